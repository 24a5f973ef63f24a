-- Keys of work that shall be done once: who does it, what became of it, and until when that is remembered.

CREATE SEQUENCE {schema}.fences START WITH 1000;  -- what is smaller was never given

-- What changes after a claim is in no index, and its page has room for it: an update writes to one page only.
CREATE TABLE {schema}.keys (
    key             text COLLATE "C" PRIMARY KEY CHECK (octet_length(key) <= 255),
    state           text NOT NULL CHECK (state IN ('held', 'free', 'done', 'parked')),
    fence           bigint NOT NULL,
    owner           text NOT NULL,
    lease_until     bigint NOT NULL,    -- in UNIX milliseconds, as all times; counts while it is held
    fingerprint     bytea,
    attempts        integer NOT NULL,
    crashes         integer NOT NULL,
    steps           jsonb,              -- name to value, in base64
    result          bytea,
    flags           integer NOT NULL,
    first_claim_at  bigint NOT NULL,
    expires_at      bigint NOT NULL     -- set by a claim, and by nothing else
) WITH (fillfactor = 70);

CREATE INDEX keys_by_expiry ON {schema}.keys (expires_at);

CREATE TABLE {schema}.marks (
    name        text COLLATE "C" PRIMARY KEY,
    expires_at  bigint NOT NULL
);

CREATE INDEX marks_by_expiry ON {schema}.marks (expires_at);

CREATE TABLE {schema}.reservations (
    name        text COLLATE "C" PRIMARY KEY,
    holder      text NOT NULL,
    expires_at  bigint NOT NULL
);

CREATE INDEX reservations_by_expiry ON {schema}.reservations (expires_at);
