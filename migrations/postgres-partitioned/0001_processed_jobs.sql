-- One row for each job, named by consumer and idempotency key. It is made by the first message that asks for the job, and
-- it tells every later one whether the job is running, done or failed.
--
-- For large installations: the same table in 16 parts, by a hash of the key. Each part has its own index of a sixteenth of the
-- size, is vacuumed for itself, and can be moved to a tablespace of its own. The pair stays unique over all of them.
--
-- Instants are the server's (clock_timestamp()), never a worker's.
CREATE TABLE processed_jobs (
    -- "C" compares bytes: keys that differ in case, accents or blanks are different jobs, on every server, and the order
    -- is the one in which the workers sort their batches before they lock.
    consumer_name     varchar(100) COLLATE "C" NOT NULL,
    idempotency_key   varchar(255) COLLATE "C" NOT NULL,

    status            varchar(10)  NOT NULL,
    -- PROCESSING: from this instant on another worker may take over.
    locked_until      timestamptz,
    -- Names the last claim. Whoever writes with another token has lost the job.
    token             uuid,
    -- Counts the claims, for people; it grows even when attempts are given back.
    fence             bigint       NOT NULL,
    attempts          integer      NOT NULL,
    -- FAILED, transient: not tried before this instant.
    next_attempt_at   timestamptz,
    failure_kind      varchar(10),

    -- What the first message said: the same key with another payload is a conflict, not a duplicate.
    payload_hash      varchar(71),
    result_hash       varchar(128),
    result            bytea,
    -- The last error, also of a job that succeeded later.
    error_message     text,

    -- The instance that claimed last. For people: nothing compares it.
    owner             varchar(255),
    -- The delivery that made the row, such as topic/partition/offset.
    message_id        varchar(512),
    duplicates        bigint       NOT NULL DEFAULT 0,
    last_duplicate_at timestamptz,

    created_at        timestamptz  NOT NULL,
    updated_at        timestamptz  NOT NULL,
    completed_at      timestamptz,

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
) PARTITION BY HASH (consumer_name, idempotency_key);

-- Half of each page stays free, so that a row claimed in a batch is completed within its page and no index changes (HOT). Where
-- every handler is atomic, rows are inserted as completed and never updated; 100 is better there. A table that grows and is
-- purged all the time is looked after in small steps.
DO $$
BEGIN
    FOR part IN 0..15 LOOP
        EXECUTE format(
            'CREATE TABLE processed_jobs_%s PARTITION OF processed_jobs FOR VALUES WITH (MODULUS 16, REMAINDER %s)
             WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_insert_scale_factor = 0.05,
                   autovacuum_analyze_scale_factor = 0.05)',
            part, part);
    END LOOP;
END
$$;

-- For purging old rows. It costs nothing at insert and is a few kilobytes.
-- No index may name a column that completion changes (status, locked_until, updated_at, completed_at): one is enough to
-- make every completion rewrite every index.
CREATE INDEX processed_jobs_created ON processed_jobs USING brin (created_at) WITH (pages_per_range = 32);
