-- The statements of the PostgreSQL store of deliveries, by name.

-- claim -- One row changes if this fork may run at this sequence.
INSERT INTO {schema}.deliveries AS known (message_id, sequence, fork, at)
VALUES (%(message_id)s, %(sequence)s, %(fork)s, %(now)s)
ON CONFLICT (message_id) DO UPDATE SET
    sequence = excluded.sequence, fork = excluded.fork, at = greatest(known.at, excluded.at)
    WHERE known.at <= %(over)s
        OR known.sequence < excluded.sequence
        OR (known.sequence = excluded.sequence AND coalesce(known.fork, excluded.fork) = excluded.fork)

-- advance -- A record that is over counts as none.
INSERT INTO {schema}.deliveries AS known (message_id, sequence, at)
VALUES (%(message_id)s, %(sequence)s, %(now)s)
ON CONFLICT (message_id) DO UPDATE SET
    sequence = CASE WHEN known.at <= %(over)s THEN excluded.sequence
        ELSE greatest(known.sequence, excluded.sequence) END,
    fork = CASE WHEN known.at <= %(over)s OR known.sequence < excluded.sequence THEN NULL ELSE known.fork END,
    at = greatest(known.at, excluded.at)

-- purge -- Whoever else is at it, or writes just now, is passed over.
DELETE FROM {schema}.deliveries WHERE message_id IN (
    SELECT message_id FROM {schema}.deliveries WHERE at <= %(over)s ORDER BY at LIMIT %(limit)s FOR UPDATE SKIP LOCKED
)
