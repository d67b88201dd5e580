-- One row for each state that handlers with `lock = …` change one at a time, whatever the key of their job. It is made when
-- the state is first asked for, and stays.
CREATE TABLE job_locks (
    -- What the lock is on, such as account_id=7, as bytes: see processed_jobs.
    lock_name       VARBINARY(1020) NOT NULL,
    -- Held by a job whose effect is elsewhere, from this instant on free again; NULL if free. An atomic job holds the row
    -- itself instead, until its transaction ends.
    locked_until    DATETIME(6)     NULL,
    -- The holder's claim. Only who has it may extend or free the lock.
    token           BINARY(16)      NULL,
    -- The job that held it last. For people: nothing compares it.
    consumer_name   VARBINARY(400)  NULL,
    idempotency_key VARBINARY(1020) NULL,
    updated_at      DATETIME(6)     NOT NULL,

    PRIMARY KEY (lock_name),
    CONSTRAINT job_locks_state CHECK ((token IS NULL) = (locked_until IS NULL))
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET = utf8mb4 COLLATE = utf8mb4_bin;
