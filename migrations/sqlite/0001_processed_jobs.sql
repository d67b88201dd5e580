-- One row for each job, named by consumer and idempotency key. It is made by the first message that asks for the job, and
-- it tells every later one whether the job is running, done or failed.
--
-- Instants are microseconds since 1970 (UTC), of the machine's clock as SQLite reads it. To read one:
--   SELECT datetime(locked_until / 1000000, 'unixepoch', 'localtime') FROM processed_jobs;
CREATE TABLE processed_jobs (
    -- BINARY compares bytes: keys that differ in case, accents or blanks are different jobs.
    consumer_name     TEXT    NOT NULL COLLATE BINARY CHECK (length(consumer_name) BETWEEN 1 AND 100),
    idempotency_key   TEXT    NOT NULL COLLATE BINARY CHECK (length(idempotency_key) BETWEEN 1 AND 255),

    status            TEXT    NOT NULL,
    -- PROCESSING: from this instant on another worker may take over.
    locked_until      INTEGER,
    -- Names the last claim, as a UUID in text. Whoever writes with another token has lost the job.
    token             TEXT,
    -- Counts the claims, for people; it grows even when attempts are given back.
    fence             INTEGER NOT NULL,
    attempts          INTEGER NOT NULL,
    -- FAILED, transient: not tried before this instant.
    next_attempt_at   INTEGER,
    failure_kind      TEXT,

    -- What the first message said: the same key with another payload is a conflict, not a duplicate.
    payload_hash      TEXT,
    result_hash       TEXT,
    result            BLOB,
    -- The last error, also of a job that succeeded later.
    error_message     TEXT,

    -- The instance that claimed last. For people: nothing compares it.
    owner             TEXT,
    -- The delivery that made the row, such as topic/partition/offset.
    message_id        TEXT,
    duplicates        INTEGER NOT NULL DEFAULT 0,
    last_duplicate_at INTEGER,

    created_at        INTEGER NOT NULL,
    updated_at        INTEGER NOT NULL,
    completed_at      INTEGER,

    -- The guard itself: of several workers the one whose insert comes first has the job.
    CONSTRAINT processed_jobs_pkey PRIMARY KEY (consumer_name, idempotency_key),
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
-- The key is the table: half the disk, and one search instead of two.
) STRICT, WITHOUT ROWID;
