-- What the migrations of postgres/ end in, for reading. A test builds this and compares it with them.

CREATE TABLE _idem_migrations (
    version    bigint      PRIMARY KEY,
    name       text        NOT NULL,
    checksum   text        NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

CREATE TABLE processed_jobs (
    consumer_name     varchar(100) COLLATE "C" NOT NULL,
    idempotency_key   varchar(255) COLLATE "C" NOT NULL,
    status            varchar(10)  NOT NULL,
    locked_until      timestamptz,
    token             uuid,
    fence             bigint       NOT NULL,
    attempts          integer      NOT NULL,
    next_attempt_at   timestamptz,
    failure_kind      varchar(10),
    payload_hash      varchar(71),
    result_hash       varchar(128),
    result            bytea,
    error_message     text,
    owner             varchar(255),
    message_id        varchar(512),
    duplicates        bigint       NOT NULL DEFAULT 0,
    last_duplicate_at timestamptz,
    created_at        timestamptz  NOT NULL,
    updated_at        timestamptz  NOT NULL,
    completed_at      timestamptz,
    CONSTRAINT processed_jobs_pkey PRIMARY KEY (consumer_name, idempotency_key),
    CONSTRAINT processed_jobs_state CHECK (
        CASE status
            WHEN 'RECEIVED' THEN token IS NULL AND locked_until IS NULL AND failure_kind IS NULL AND next_attempt_at IS NULL
            WHEN 'PROCESSING' THEN token IS NOT NULL AND locked_until IS NOT NULL AND failure_kind IS NULL AND next_attempt_at IS NULL
            WHEN 'COMPLETED' THEN locked_until IS NULL AND failure_kind IS NULL AND next_attempt_at IS NULL
            WHEN 'FAILED' THEN locked_until IS NULL
                AND CASE failure_kind
                    WHEN 'transient' THEN next_attempt_at IS NOT NULL
                    WHEN 'terminal' THEN next_attempt_at IS NULL
                    WHEN 'exhausted' THEN next_attempt_at IS NULL
                    ELSE false
                END
            ELSE false
        END
    ),
    CONSTRAINT processed_jobs_counts CHECK (fence >= 0 AND attempts >= 0)
) WITH (
    fillfactor = 50,
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_insert_scale_factor = 0.05,
    autovacuum_analyze_scale_factor = 0.05
);

CREATE INDEX processed_jobs_created ON processed_jobs USING brin (created_at) WITH (pages_per_range = 32);

CREATE TABLE job_locks (
    lock_name       varchar(255) COLLATE "C" NOT NULL,
    locked_until    timestamptz,
    token           uuid,
    consumer_name   varchar(100),
    idempotency_key varchar(255),
    updated_at      timestamptz NOT NULL,
    CONSTRAINT job_locks_pkey PRIMARY KEY (lock_name),
    CONSTRAINT job_locks_state CHECK ((token IS NULL) = (locked_until IS NULL))
);
