-- One small row a downstream, changed by compare and set.
CREATE TABLE {schema}.breakers (
    name text COLLATE "C" PRIMARY KEY,
    record text NOT NULL,
    at timestamptz NOT NULL DEFAULT clock_timestamp()
) WITH (fillfactor = 50);
