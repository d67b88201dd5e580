-- One row for each job, named by consumer and idempotency key. It is made by the first message that asks for the job, and
-- it tells every later one whether the job is running, done or failed.
--
-- For MariaDB 10.6 or later and MySQL 8.0.16 or later; nothing here is in one of them only.
--
-- Instants are the server's, in UTC, whatever the session's time_zone is: DATETIME is never converted, and what is written
-- comes from UTC_TIMESTAMP(6). (TIMESTAMP would be converted, and ends in 2038.)
CREATE TABLE processed_jobs (
    -- Bytes, not text: no collation, no padding with blanks and no folding of case can make two keys one, on any server,
    -- and the order is the one in which the workers sort their batches before they lock. 100 and 255 characters are up to
    -- four bytes each. For people they read as text where the client does not show binary columns in hexadecimal:
    --   SELECT CONVERT(idempotency_key USING utf8mb4), status FROM processed_jobs WHERE idempotency_key = 'order-1';
    consumer_name     VARBINARY(400)  NOT NULL,
    idempotency_key   VARBINARY(1020) NOT NULL,

    status            VARCHAR(10)     CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    -- PROCESSING: from this instant on another worker may take over.
    locked_until      DATETIME(6)     NULL,
    -- Names the last claim, as the bytes of a UUID (HEX(token) shows it). Whoever writes with another token has lost the job.
    token             BINARY(16)      NULL,
    -- Counts the claims, for people; it grows even when attempts are given back.
    fence             BIGINT          NOT NULL,
    attempts          INT             NOT NULL,
    -- FAILED, transient: not tried before this instant.
    next_attempt_at   DATETIME(6)     NULL,
    failure_kind      VARCHAR(10)     CHARACTER SET ascii COLLATE ascii_bin NULL,

    -- What the first message said: the same key with another payload is a conflict, not a duplicate.
    payload_hash      VARCHAR(71)     CHARACTER SET ascii COLLATE ascii_bin NULL,
    result_hash       VARCHAR(128)    CHARACTER SET ascii COLLATE ascii_bin NULL,
    result            LONGBLOB        NULL,
    -- The last error, also of a job that succeeded later.
    error_message     TEXT            NULL,

    -- The instance that claimed last. For people: nothing compares it.
    owner             VARCHAR(255)    NULL,
    -- The delivery that made the row, such as topic/partition/offset.
    message_id        VARCHAR(512)    NULL,
    duplicates        BIGINT          NOT NULL DEFAULT 0,
    last_duplicate_at DATETIME(6)     NULL,

    created_at        DATETIME(6)     NOT NULL,
    updated_at        DATETIME(6)     NOT NULL,
    completed_at      DATETIME(6)     NULL,

    -- The guard itself: of several workers the one whose insert comes first has the job. It is also the order of the table
    -- on disk, so that a claim and a completion search it once.
    PRIMARY KEY (consumer_name, idempotency_key),
    -- For purging old rows. No index may name a column that completion changes (status, locked_until, updated_at,
    -- completed_at): every completion would move its entry, and lock around it.
    KEY processed_jobs_created (created_at),
    -- What the workers rely on when they read a row. A row changed by hand must keep to it.
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
