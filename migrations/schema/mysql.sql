-- What the migrations of mysql/ end in, for reading. A test builds this and compares it with them.

CREATE TABLE _idem_migrations (
    version    BIGINT       NOT NULL PRIMARY KEY,
    name       VARCHAR(255) NOT NULL,
    checksum   CHAR(64)     NOT NULL,
    -- Empty while it is being applied: DDL is committed statement by statement here.
    applied_at DATETIME(6)  NULL
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET = utf8mb4 COLLATE = utf8mb4_bin;

CREATE TABLE processed_jobs (
    consumer_name     VARBINARY(400)  NOT NULL,
    idempotency_key   VARBINARY(1020) NOT NULL,
    status            VARCHAR(10)     CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    locked_until      DATETIME(6)     NULL,
    token             BINARY(16)      NULL,
    fence             BIGINT          NOT NULL,
    attempts          INT             NOT NULL,
    next_attempt_at   DATETIME(6)     NULL,
    failure_kind      VARCHAR(10)     CHARACTER SET ascii COLLATE ascii_bin NULL,
    payload_hash      VARCHAR(71)     CHARACTER SET ascii COLLATE ascii_bin NULL,
    result_hash       VARCHAR(128)    CHARACTER SET ascii COLLATE ascii_bin NULL,
    result            LONGBLOB        NULL,
    error_message     TEXT            NULL,
    owner             VARCHAR(255)    NULL,
    message_id        VARCHAR(512)    NULL,
    duplicates        BIGINT          NOT NULL DEFAULT 0,
    last_duplicate_at DATETIME(6)     NULL,
    created_at        DATETIME(6)     NOT NULL,
    updated_at        DATETIME(6)     NOT NULL,
    completed_at      DATETIME(6)     NULL,
    PRIMARY KEY (consumer_name, idempotency_key),
    KEY processed_jobs_created (created_at),
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
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET = utf8mb4 COLLATE = utf8mb4_bin;

CREATE TABLE job_locks (
    lock_name       VARBINARY(1020) NOT NULL,
    locked_until    DATETIME(6)     NULL,
    token           BINARY(16)      NULL,
    consumer_name   VARBINARY(400)  NULL,
    idempotency_key VARBINARY(1020) NULL,
    updated_at      DATETIME(6)     NOT NULL,
    PRIMARY KEY (lock_name),
    CONSTRAINT job_locks_state CHECK ((token IS NULL) = (locked_until IS NULL))
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET = utf8mb4 COLLATE = utf8mb4_bin;
