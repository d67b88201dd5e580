//! What a store says when it cannot be opened, and that it says it in time.

use std::error::Error;
use std::time::Duration;

use idem_core::store::{Engine, MysqlStore, PgStore, SqliteStore, StoreError, StoreErrorKind, StoreOptions, connect};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::time::timeout;

use crate::subjects::{Folder, mariadb_url, postgres_url};

/// What a person and a program see of an error.
fn shown(error: &StoreError) -> String {
    let mut shown = format!("{error} / {error:?}");
    let mut cause = error.source();
    while let Some(error) = cause {
        shown += &format!(" / {error}");
        cause = error.source();
    }
    shown
}

async fn refused(url: &str) -> (StoreErrorKind, String) {
    let options = StoreOptions::default().acquire_timeout(Duration::from_secs(2));
    match timeout(Duration::from_secs(20), connect(url, &options)).await.expect("it ends in time") {
        Ok(store) => panic!("{url} opened a store of {}", store.engine()),
        Err(error) => {
            let shown = shown(&error);
            assert!(!shown.contains("s3cret"), "the password is shown: {shown}");
            (error.kind(), shown)
        }
    }
}

#[tokio::test]
async fn a_url_chooses_the_engine() {
    let folder = Folder::new();
    let options = StoreOptions::default();
    for (url, engine) in [
        ("memory:".to_owned(), Engine::Memory),
        (folder.url(), Engine::Sqlite),
        (format!("sqlite://{}/other.db", folder.0.display()), Engine::Sqlite),
        (postgres_url(), Engine::Postgres),
        (postgres_url().replace("postgres://", "postgresql://"), Engine::Postgres),
        (mariadb_url(), Engine::Mysql),
        (mariadb_url().replace("mysql://", "mariadb://"), Engine::Mysql),
    ] {
        assert_eq!(connect(&url, &options).await.expect("it opens").engine(), engine, "{url}");
    }
}

#[tokio::test]
async fn a_url_that_cannot_be_right_is_a_configuration_error() {
    for (url, says) in [
        ("oracle://root:s3cret@localhost/shop", "`oracle:` is not a kind of store that idem knows"),
        ("s3cret-without-scheme", "use postgres://"),
        ("", "use postgres://"),
        ("postgres://app:s3cret@localhost:port/shop", "malformed"),
        ("postgres://app:s3cret@localhost/shop?sslmode=perhaps", "malformed"),
        ("mysql://app:s3cret@localhost:port/shop", "malformed"),
        ("mysql://app:s3cret@localhost/shop?ssl-mode=perhaps", "malformed"),
        ("mysql://app:s3cret@localhost", "names no database"),
        ("mariadb://app:s3cret@localhost/", "names no database"),
        ("sqlite:", "sqlite:path/to/file"),
        ("sqlite://", "sqlite:path/to/file"),
        ("sqlite::memory:", "memory"),
        ("sqlite:jobs.db?mode=memory", "memory"),
        ("sqlite:jobs.db?mode=ro", "reading only"),
        ("sqlite:jobs.db?colour=red", "malformed"),
    ] {
        let (kind, shown) = refused(url).await;
        assert_eq!(kind, StoreErrorKind::Configuration, "{url}: {shown}");
        assert!(shown.contains(says), "{url}: {shown}");
    }
}

#[tokio::test]
async fn options_that_clash_are_reported_at_once() {
    let options = StoreOptions::default().max_connections(0).lock_timeout(Duration::from_secs(20));
    for error in [
        PgStore::connect(&postgres_url(), &options).await.map(drop).expect_err("the options clash"),
        MysqlStore::connect(&mariadb_url(), &options).await.map(drop).expect_err("the options clash"),
        SqliteStore::connect("sqlite:unused.db", &options).await.map(drop).expect_err("the options clash"),
    ] {
        assert_eq!(error.kind(), StoreErrorKind::Configuration);
        assert!(error.to_string().contains("max_connections is 0") && error.to_string().contains("lock_timeout 20s"));
    }
}

/// MySQL would wait for a whole second, by which time the call is over.
#[tokio::test]
async fn options_that_clash_once_mysql_has_rounded_them_are_reported_at_once() {
    let second = Duration::from_secs(1);
    let options = StoreOptions::default().call_timeout(second).lock_timeout(second / 2);
    let error = MysqlStore::connect(&mariadb_url(), &options).await.map(drop).expect_err("the options clash");
    assert_eq!(error.kind(), StoreErrorKind::Configuration);
    assert!(error.to_string().contains("rounds up to 1 s"), "{error}");
}

#[tokio::test]
async fn an_unknown_database_or_user_is_a_configuration_error() {
    let url = postgres_url();
    let (address, _) = url.rsplit_once('/').expect("the address ends in a database");
    let (kind, shown) = refused(&format!("{address}/no_such_database")).await;
    assert_eq!(kind, StoreErrorKind::Configuration, "{shown}");
    assert!(shown.contains("no_such_database"), "{shown}");

    let (_, host) = address.rsplit_once('@').expect("the address has a user");
    let (kind, shown) = refused(&format!("postgres://nobody_here:s3cret@{host}/postgres")).await;
    assert_eq!(kind, StoreErrorKind::Configuration, "{shown}");
    assert!(shown.contains("nobody_here"), "{shown}");

    let url = mariadb_url();
    let (address, database) = url.rsplit_once('/').expect("the address ends in a database");
    let (kind, shown) = refused(&format!("{address}/no_such_database")).await;
    assert_eq!(kind, StoreErrorKind::Configuration, "{shown}");
    assert!(shown.contains("no_such_database"), "{shown}");

    let (_, host) = address.rsplit_once('@').expect("the address has a user");
    let (kind, shown) = refused(&format!("mysql://nobody_here:s3cret@{host}/{database}")).await;
    assert_eq!(kind, StoreErrorKind::Configuration, "{shown}");
    assert!(shown.contains("nobody_here") && shown.contains("Access denied"), "{shown}");
}

/// A server that answers the first message with `answer` and then nothing more.
async fn server_that_says(answer: Vec<u8>) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
    let port = listener.local_addr().expect("it is bound").port();
    tokio::spawn(async move {
        let mut open = Vec::new();
        while let Ok((mut socket, _)) = listener.accept().await {
            let mut message = [0; 1024];
            let _ = socket.read(&mut message).await;
            let _ = socket.write_all(&answer).await;
            open.push(socket);
        }
    });
    port
}

/// `ErrorResponse` of PostgreSQL's protocol.
fn error_response(code: &str, text: &str) -> Vec<u8> {
    let mut fields = Vec::new();
    for (kind, value) in [('S', "FATAL"), ('V', "FATAL"), ('C', code), ('M', text)] {
        fields.push(kind as u8);
        fields.extend_from_slice(value.as_bytes());
        fields.push(0);
    }
    fields.push(0);
    let length = u32::try_from(fields.len() + 4).expect("it is short");
    [&b"E"[..], &length.to_be_bytes(), &fields].concat()
}

#[tokio::test]
async fn a_refused_password_is_a_configuration_error_that_does_not_show_it() {
    let answer = error_response("28P01", "password authentication failed for user \"app\"");
    let port = server_that_says(answer).await;
    let (kind, shown) = refused(&format!("postgres://app:s3cret@127.0.0.1:{port}/shop?sslmode=disable")).await;
    assert_eq!(kind, StoreErrorKind::Configuration, "{shown}");
    assert!(
        shown.contains("\"shop\"") && shown.contains("\"app\"") && shown.contains("password authentication failed")
    );
}

#[tokio::test]
async fn a_server_that_is_starting_is_unavailable() {
    let port = server_that_says(error_response("57P03", "the database system is starting up")).await;
    let (kind, shown) = refused(&format!("postgres://app:s3cret@127.0.0.1:{port}/shop?sslmode=disable")).await;
    assert_eq!(kind, StoreErrorKind::Unavailable, "{shown}");
}

#[tokio::test]
async fn a_server_that_does_not_answer_is_unavailable() {
    let hung = server_that_says(Vec::new()).await;
    let (kind, shown) = refused(&format!("postgres://app:s3cret@127.0.0.1:{hung}/shop?sslmode=disable")).await;
    assert_eq!(kind, StoreErrorKind::Unavailable, "{shown}");

    let (kind, shown) = refused(&format!("mysql://app:s3cret@127.0.0.1:{hung}/shop")).await;
    assert_eq!(kind, StoreErrorKind::Unavailable, "{shown}");

    let free =
        TcpListener::bind("127.0.0.1:0").await.expect("a port is free").local_addr().expect("it is bound").port();
    let (kind, shown) = refused(&format!("postgres://app:s3cret@127.0.0.1:{free}/shop")).await;
    assert_eq!(kind, StoreErrorKind::Unavailable, "{shown}");
    assert!(shown.contains(&free.to_string()), "{shown}");
    let (kind, shown) = refused(&format!("mysql://app:s3cret@127.0.0.1:{free}/shop")).await;
    assert_eq!(kind, StoreErrorKind::Unavailable, "{shown}");
    assert!(shown.contains(&free.to_string()), "{shown}");
}

#[tokio::test]
async fn a_path_that_cannot_be_written_is_a_configuration_error_that_names_it() {
    let folder = Folder::new();
    let text = folder.0.join("letter.txt");
    std::fs::write(&text, "Dear reader, this is no database. ".repeat(100)).expect("the folder can be written");
    for path in [folder.0.join("missing").join("jobs.db"), folder.0.clone(), text.join("jobs.db"), text.clone()] {
        let (kind, shown) = refused(&format!("sqlite:{}", path.display())).await;
        assert_eq!(kind, StoreErrorKind::Configuration, "{shown}");
        assert!(shown.contains(&path.display().to_string()), "{shown}");
    }
    assert!(std::fs::read_to_string(&text).expect("it is still there").starts_with("Dear reader"));
}
