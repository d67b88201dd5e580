-- One row for each state that handlers with `lock = …` change one at a time, whatever the key of their job. It is made when
-- the state is first asked for, and stays.
CREATE TABLE job_locks (
    -- What the lock is on, such as account_id=7.
    lock_name       varchar(255) COLLATE "C" NOT NULL,
    -- Held by a job whose effect is elsewhere, from this instant on free again; NULL if free. An atomic job holds the row
    -- itself instead, until its transaction ends.
    locked_until    timestamptz,
    -- The holder's claim. Only who has it may extend or free the lock.
    token           uuid,
    -- The job that held it last. For people: nothing compares it.
    consumer_name   varchar(100),
    idempotency_key varchar(255),
    updated_at      timestamptz NOT NULL,

    CONSTRAINT job_locks_pkey PRIMARY KEY (lock_name),
    CONSTRAINT job_locks_state CHECK ((token IS NULL) = (locked_until IS NULL))
);
