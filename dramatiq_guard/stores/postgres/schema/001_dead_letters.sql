-- Letters, and what makes looking through them cost the same however many there are: letters that agree in queue,
-- actor, reason, error type and fingerprint share a cell, and the letters of each cell are counted as they come and go.

CREATE TABLE {schema}.cells (
    cell         text PRIMARY KEY,
    queue        text NOT NULL,
    actor        text NOT NULL,
    reason       text NOT NULL,
    error_type   text NOT NULL,
    fingerprint  text NOT NULL
);

CREATE TABLE {schema}.dead_letters (
    letter_id          text COLLATE "C" PRIMARY KEY,
    message_id         text NOT NULL,
    cell               text NOT NULL,
    died_at            bigint NOT NULL,
    message_timestamp  bigint NOT NULL,
    replay_n           integer NOT NULL,
    record             text NOT NULL,       -- JSON as text: jsonb refuses what a message may hold
    searched           text NOT NULL,       -- the arguments in lower case, the first 16 KiB
    state              text NOT NULL CHECK (state IN ('dead', 'replaying', 'replayed', 'discarded')),
    since              bigint NOT NULL,
    by_whom            text NOT NULL DEFAULT '',
    why                text NOT NULL DEFAULT '',
    events             jsonb NOT NULL DEFAULT '[]',
    n                  integer,
    token              text,
    owner              text,
    lease_until        bigint,
    enqueued_at        bigint,
    delivered_at       bigint,
    outcome            text,
    outcome_at         bigint,
    died_as            text
);

CREATE INDEX dead_letters_by_death ON {schema}.dead_letters (state, died_at, letter_id);
CREATE INDEX dead_letters_by_cell ON {schema}.dead_letters (cell, state, died_at, letter_id);

-- The number of the latest replay of a message, over all of its letters.
CREATE TABLE {schema}.replay_numbers (
    message_id  text PRIMARY KEY,
    n           integer NOT NULL,
    at          bigint NOT NULL
);

-- Each connection counts in a slot of its own, so that a storm of letters of one kind does not queue for one row.
CREATE TABLE {schema}.letter_counts (
    cell   text NOT NULL,
    state  text NOT NULL,
    slot   integer NOT NULL,
    n      bigint NOT NULL,
    PRIMARY KEY (cell, state, slot)
) WITH (fillfactor = 50);

CREATE FUNCTION {schema}.count_letters() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP <> 'INSERT' THEN
        INSERT INTO {schema}.letter_counts AS c (cell, state, slot, n)
        SELECT cell, state, pg_backend_pid() % 16, -count(*) FROM gone GROUP BY cell, state ORDER BY cell, state
        ON CONFLICT (cell, state, slot) DO UPDATE SET n = c.n + excluded.n;
    END IF;
    IF TG_OP <> 'DELETE' THEN
        INSERT INTO {schema}.letter_counts AS c (cell, state, slot, n)
        SELECT cell, state, pg_backend_pid() % 16, count(*) FROM come GROUP BY cell, state ORDER BY cell, state
        ON CONFLICT (cell, state, slot) DO UPDATE SET n = c.n + excluded.n;
    END IF;
    RETURN NULL;
END
$$;

CREATE TRIGGER count_letters_put AFTER INSERT ON {schema}.dead_letters
    REFERENCING NEW TABLE AS come FOR EACH STATEMENT EXECUTE FUNCTION {schema}.count_letters();
CREATE TRIGGER count_letters_moved AFTER UPDATE ON {schema}.dead_letters
    REFERENCING OLD TABLE AS gone NEW TABLE AS come FOR EACH STATEMENT EXECUTE FUNCTION {schema}.count_letters();
CREATE TRIGGER count_letters_purged AFTER DELETE ON {schema}.dead_letters
    REFERENCING OLD TABLE AS gone FOR EACH STATEMENT EXECUTE FUNCTION {schema}.count_letters();
