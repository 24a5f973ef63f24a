-- How far each message has been settled, and which copy of it runs; for brokers that cannot move one in a single step.

CREATE TABLE {schema}.deliveries (
    message_id  text PRIMARY KEY,
    sequence    bigint NOT NULL,
    fork        text,               -- NULL: no copy has arrived at this sequence yet
    at          bigint NOT NULL     -- the last write, in UNIX milliseconds
);

CREATE INDEX deliveries_by_age ON {schema}.deliveries (at);
