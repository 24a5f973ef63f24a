-- Which worker processes are alive, which messages they have begun, and which ones processes died of.

-- Two rows written and removed for each message: not worth a log that outlives a crash of the server, after which the
-- living say again that they live.
CREATE UNLOGGED TABLE {schema}.processes (
    process     text COLLATE "C" PRIMARY KEY,
    host        text NOT NULL,
    pid         integer NOT NULL,
    until       bigint NOT NULL     -- until when it counts as alive, in UNIX milliseconds
) WITH (fillfactor = 50);

CREATE UNLOGGED TABLE {schema}.starts (
    message_id  text COLLATE "C" NOT NULL,
    process     text COLLATE "C" NOT NULL,
    at          bigint NOT NULL,
    PRIMARY KEY (message_id, process)
) WITH (autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_scale_factor = 0);

CREATE INDEX starts_by_process ON {schema}.starts (process);

CREATE TABLE {schema}.crashes (
    message_id  text COLLATE "C" NOT NULL,
    process     text COLLATE "C" NOT NULL,
    at          bigint NOT NULL,    -- when it had begun the message
    host        text NOT NULL,
    pid         integer NOT NULL,
    PRIMARY KEY (message_id, process)
);

CREATE INDEX crashes_by_time ON {schema}.crashes (at);
