//! The contract against every store, and what is particular to each engine.

#[path = "stores/subjects.rs"]
mod subjects;

mod memory {
    idem_core::store_contract!(crate::subjects::memory);
}

mod sqlite {
    idem_core::store_contract!(crate::subjects::sqlite);
}

mod postgres {
    idem_core::store_contract!(crate::subjects::postgres);
}

mod postgres_behind_a_transaction_pooler {
    idem_core::store_contract!(crate::subjects::postgres_behind_a_transaction_pooler);
}

mod postgres_in_parts {
    idem_core::store_contract!(crate::subjects::postgres_partitioned);
}

mod postgres_whose_default_is_serializable {
    idem_core::store_contract!(crate::subjects::postgres_serializable);
}

mod mariadb {
    idem_core::store_contract!(crate::subjects::mariadb);
}

#[path = "stores/columns.rs"]
mod columns;
#[path = "stores/connecting.rs"]
mod connecting;
#[path = "stores/dying.rs"]
mod dying;
#[path = "stores/migrating.rs"]
mod migrating;
#[path = "stores/only_mysql.rs"]
mod only_mysql;
#[path = "stores/only_postgres.rs"]
mod only_postgres;
#[path = "stores/only_sqlite.rs"]
mod only_sqlite;
