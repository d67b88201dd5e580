-- What the migrations of sqlite/ end in, for reading. A test builds this and compares it with them.

CREATE TABLE _idem_migrations (
    version    INTEGER PRIMARY KEY,
    name       TEXT    NOT NULL,
    checksum   TEXT    NOT NULL,
    applied_at TEXT    NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%fZ'))
) STRICT;

CREATE TABLE processed_jobs (
    consumer_name     TEXT    NOT NULL COLLATE BINARY CHECK (length(consumer_name) BETWEEN 1 AND 100),
    idempotency_key   TEXT    NOT NULL COLLATE BINARY CHECK (length(idempotency_key) BETWEEN 1 AND 255),
    status            TEXT    NOT NULL,
    locked_until      INTEGER,
    token             TEXT,
    fence             INTEGER NOT NULL,
    attempts          INTEGER NOT NULL,
    next_attempt_at   INTEGER,
    failure_kind      TEXT,
    payload_hash      TEXT,
    result_hash       TEXT,
    result            BLOB,
    error_message     TEXT,
    owner             TEXT,
    message_id        TEXT,
    duplicates        INTEGER NOT NULL DEFAULT 0,
    last_duplicate_at INTEGER,
    created_at        INTEGER NOT NULL,
    updated_at        INTEGER NOT NULL,
    completed_at      INTEGER,
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
) STRICT, WITHOUT ROWID;

CREATE TABLE job_locks (
    lock_name       TEXT    NOT NULL COLLATE BINARY CHECK (length(lock_name) BETWEEN 1 AND 255),
    locked_until    INTEGER,
    token           TEXT,
    consumer_name   TEXT,
    idempotency_key TEXT,
    updated_at      INTEGER NOT NULL,
    CONSTRAINT job_locks_pkey PRIMARY KEY (lock_name),
    CONSTRAINT job_locks_state CHECK ((token IS NULL) = (locked_until IS NULL))
) STRICT, WITHOUT ROWID;
