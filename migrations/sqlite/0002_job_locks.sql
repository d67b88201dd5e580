-- One row for each state that handlers with `lock = …` change one at a time, whatever the key of their job. It is made when
-- the state is first asked for, and stays.
CREATE TABLE job_locks (
    -- What the lock is on, such as account_id=7.
    lock_name       TEXT    NOT NULL COLLATE BINARY CHECK (length(lock_name) BETWEEN 1 AND 255),
    -- Held by a job whose effect is elsewhere, from this instant on free again; NULL if free. An atomic job needs no more than
    -- the file, of which it is the only writer.
    locked_until    INTEGER,
    -- The holder's claim. Only who has it may extend or free the lock.
    token           TEXT,
    -- The job that held it last. For people: nothing compares it.
    consumer_name   TEXT,
    idempotency_key TEXT,
    updated_at      INTEGER NOT NULL,

    CONSTRAINT job_locks_pkey PRIMARY KEY (lock_name),
    CONSTRAINT job_locks_state CHECK ((token IS NULL) = (locked_until IS NULL))
) STRICT, WITHOUT ROWID;
