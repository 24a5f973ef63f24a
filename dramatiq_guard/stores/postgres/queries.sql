-- The statements of the PostgreSQL store of letters, by name.

-- put -- Writes a letter and tells the one that was replayed; one row if it was new.
WITH known_cell AS (
    INSERT INTO {schema}.cells (cell, queue, actor, reason, error_type, fingerprint)
    VALUES (%(cell)s, %(queue)s, %(actor)s, %(reason)s, %(error_type)s, %(fingerprint)s)
    ON CONFLICT (cell) DO NOTHING
), put AS (
    INSERT INTO {schema}.dead_letters AS l
        (letter_id, message_id, cell, died_at, message_timestamp, replay_n, record, searched, state, since)
    VALUES (%(letter_id)s, %(message_id)s, %(cell)s, %(died_at)s, %(message_timestamp)s, %(replay_n)s, %(record)s,
        %(searched)s, 'dead', %(died_at)s)
    ON CONFLICT (letter_id) DO UPDATE SET
        cell = excluded.cell, died_at = excluded.died_at, message_timestamp = excluded.message_timestamp,
        replay_n = excluded.replay_n, record = excluded.record, searched = excluded.searched, state = 'dead',
        since = excluded.since, by_whom = '', why = '', events = l.events || %(event)s::jsonb
        WHERE l.state IN ('replayed', 'discarded') AND l.died_at <> excluded.died_at
    RETURNING 1
), parent AS (
    UPDATE {schema}.dead_letters SET
        outcome = 'died', outcome_at = %(died_at)s, died_as = %(letter_id)s,
        since = CASE state WHEN 'replaying' THEN %(died_at)s ELSE since END,
        state = CASE state WHEN 'replaying' THEN 'replayed' ELSE state END
    WHERE letter_id = %(replay_of)s AND n = %(replay_n)s AND EXISTS (SELECT FROM put)
), note AS (
    INSERT INTO {schema}.unsettled_letters (letter_id, message_id, died_at)
    SELECT %(letter_id)s, %(message_id)s, %(died_at)s FROM put
    ON CONFLICT (letter_id) DO UPDATE SET died_at = excluded.died_at
)
SELECT 1 FROM put

-- settled --
DELETE FROM {schema}.unsettled_letters WHERE letter_id = ANY (%(ids)s)

-- unsettled --
SELECT letter_id, message_id FROM {schema}.unsettled_letters
WHERE died_at < %(before)s ORDER BY died_at DESC, letter_id DESC LIMIT %(limit)s

-- withdraw -- Removes a letter that is still dead and still unsettled, with its note.
WITH letter AS (
    SELECT letter_id FROM {schema}.dead_letters WHERE letter_id = %(id)s AND state = 'dead' FOR UPDATE
), note AS (
    DELETE FROM {schema}.unsettled_letters WHERE letter_id IN (SELECT letter_id FROM letter) RETURNING letter_id
)
DELETE FROM {schema}.dead_letters WHERE letter_id IN (SELECT letter_id FROM note) RETURNING letter_id, state, cell

-- forget_notes -- Those of letters that are gone, and those that are too old.
DELETE FROM {schema}.unsettled_letters WHERE letter_id = ANY (%(ids)s) OR died_at < %(cut)s

-- get --
SELECT {letter} FROM {schema}.dead_letters l WHERE letter_id = %(letter_id)s

-- page_of_states -- The latest letters of some states, from a cursor on.
SELECT {wanted}
FROM (
    SELECT k.letter_id
    FROM unnest(%(states)s::text[]) AS s(state)
    CROSS JOIN LATERAL (
        SELECT l.letter_id, l.died_at FROM {schema}.dead_letters l
        WHERE l.state = s.state AND (l.died_at, l.letter_id) < (%(at)s, %(id)s)
            AND l.died_at >= %(after)s AND l.died_at < %(before)s
            AND (%(text)s = '' OR strpos(l.searched, %(text)s) > 0)
        ORDER BY l.died_at DESC, l.letter_id DESC LIMIT %(limit)s
    ) k
    ORDER BY k.died_at DESC, k.letter_id DESC LIMIT %(limit)s
) k
JOIN {schema}.dead_letters l USING (letter_id)
ORDER BY l.died_at DESC, l.letter_id DESC

-- page_of_cells -- The same, of the cells that a filter asks for.
SELECT {wanted}
FROM (
    SELECT k.letter_id
    FROM {schema}.cells c
    CROSS JOIN unnest(%(states)s::text[]) AS s(state)
    CROSS JOIN LATERAL (
        SELECT l.letter_id, l.died_at FROM {schema}.dead_letters l
        WHERE l.cell = c.cell AND l.state = s.state AND (l.died_at, l.letter_id) < (%(at)s, %(id)s)
            AND l.died_at >= %(after)s AND l.died_at < %(before)s
            AND (%(text)s = '' OR strpos(l.searched, %(text)s) > 0)
        ORDER BY l.died_at DESC, l.letter_id DESC LIMIT %(limit)s
    ) k
    WHERE {asked}
    ORDER BY k.died_at DESC, k.letter_id DESC LIMIT %(limit)s
) k
JOIN {schema}.dead_letters l USING (letter_id)
ORDER BY l.died_at DESC, l.letter_id DESC

-- tallies -- Counts the letters of each cell; the counts are kept, so that nothing is counted here.
SELECT c.queue, c.actor, c.reason, c.error_type, c.fingerprint, kept.n, first.died_at, last.died_at, last.letter_id
FROM (
    SELECT cell, state, sum(n)::bigint AS n FROM {schema}.letter_counts
    WHERE state = ANY (%(states)s) GROUP BY cell, state HAVING sum(n) > 0
) kept
JOIN {schema}.cells c USING (cell)
CROSS JOIN LATERAL (
    SELECT l.died_at FROM {schema}.dead_letters l WHERE l.cell = kept.cell AND l.state = kept.state
    ORDER BY l.died_at, l.letter_id LIMIT 1
) first
CROSS JOIN LATERAL (
    SELECT l.died_at, l.letter_id FROM {schema}.dead_letters l WHERE l.cell = kept.cell AND l.state = kept.state
    ORDER BY l.died_at DESC, l.letter_id DESC LIMIT 1
) last
WHERE {asked}

-- tallies_counted -- The same where times or a text narrow it down: what matches is counted.
SELECT c.queue, c.actor, c.reason, c.error_type, c.fingerprint,
    count(*), min(l.died_at), max(l.died_at),
    (array_agg(l.letter_id ORDER BY l.died_at DESC, l.letter_id DESC))[1]
FROM {schema}.dead_letters l
JOIN {schema}.cells c USING (cell)
WHERE l.state = ANY (%(states)s) AND l.died_at >= %(after)s AND l.died_at < %(before)s
    AND (%(text)s = '' OR strpos(l.searched, %(text)s) > 0) AND {asked}
GROUP BY c.cell

-- lock -- Takes letters, in one order for everybody.
SELECT letter_id, state, n, lease_until, message_id, replay_n FROM {schema}.dead_letters
WHERE letter_id = ANY (%(ids)s) ORDER BY letter_id FOR UPDATE

-- numbers --
SELECT message_id, n FROM {schema}.replay_numbers WHERE message_id = ANY (%(ids)s)

-- keep_numbers --
INSERT INTO {schema}.replay_numbers AS known (message_id, n, at)
SELECT message_id, n, %(now)s FROM unnest(%(ids)s::text[], %(ns)s::integer[]) AS new(message_id, n) ORDER BY message_id
ON CONFLICT (message_id) DO UPDATE SET n = greatest(known.n, excluded.n), at = excluded.at

-- begin_replay --
UPDATE {schema}.dead_letters l SET
    state = 'replaying', since = %(now)s, by_whom = %(by)s, why = %(why)s, events = events || %(event)s::jsonb,
    n = taken.n, token = %(token)s, owner = %(owner)s, lease_until = %(lease_until)s, enqueued_at = NULL,
    delivered_at = NULL, outcome = NULL, outcome_at = NULL, died_as = NULL
FROM unnest(%(ids)s::text[], %(ns)s::integer[]) AS taken(letter_id, n)
WHERE l.letter_id = taken.letter_id
RETURNING {letter}

-- finish_replay --
UPDATE {schema}.dead_letters l SET
    enqueued_at = %(now)s,
    since = CASE state WHEN 'replaying' THEN %(now)s ELSE since END,
    state = CASE state WHEN 'replaying' THEN 'replayed' ELSE state END
FROM unnest(%(ids)s::text[], %(tokens)s::text[]) AS asked(letter_id, token)
WHERE l.letter_id = asked.letter_id AND l.token = asked.token

-- abandon_replay --
UPDATE {schema}.dead_letters l SET
    state = 'dead', since = %(now)s, by_whom = '', why = %(why)s, events = events || %(event)s::jsonb, {forgotten}
FROM unnest(%(ids)s::text[], %(tokens)s::text[]) AS asked(letter_id, token)
WHERE l.letter_id = asked.letter_id AND l.token = asked.token AND l.state = 'replaying'

-- admit_replay -- Whether the letter is there, and whether the token holds.
WITH admitted AS (
    UPDATE {schema}.dead_letters SET
        delivered_at = coalesce(delivered_at, %(now)s),
        since = CASE state WHEN 'replaying' THEN %(now)s ELSE since END,
        state = CASE state WHEN 'replaying' THEN 'replayed' ELSE state END
    WHERE letter_id = %(id)s AND token = %(token)s
    RETURNING 1
)
SELECT EXISTS (SELECT FROM {schema}.dead_letters WHERE letter_id = %(id)s), EXISTS (SELECT FROM admitted)

-- record_outcome --
UPDATE {schema}.dead_letters SET
    outcome = %(outcome)s, outcome_at = %(now)s, died_as = NULL,
    since = CASE state WHEN 'replaying' THEN %(now)s ELSE since END,
    state = CASE state WHEN 'replaying' THEN 'replayed' ELSE state END
WHERE letter_id = %(id)s AND token = %(token)s

-- discard --
UPDATE {schema}.dead_letters SET
    state = 'discarded', since = %(now)s, by_whom = %(by)s, why = %(why)s, events = events || %(event)s::jsonb
WHERE letter_id = ANY (%(ids)s) AND state = 'dead'
RETURNING letter_id

-- restore -- A discarded letter keeps what it knows of an earlier replay; a replay that was never heard of is forgotten.
UPDATE {schema}.dead_letters SET
    since = %(now)s, by_whom = %(by)s, why = %(why)s, events = events || %(event)s::jsonb, state = 'dead',
    n = CASE state WHEN 'discarded' THEN n END,
    token = CASE state WHEN 'discarded' THEN token END,
    owner = CASE state WHEN 'discarded' THEN owner END,
    lease_until = CASE state WHEN 'discarded' THEN lease_until END,
    enqueued_at = CASE state WHEN 'discarded' THEN enqueued_at END,
    delivered_at = CASE state WHEN 'discarded' THEN delivered_at END,
    outcome = CASE state WHEN 'discarded' THEN outcome END,
    outcome_at = CASE state WHEN 'discarded' THEN outcome_at END,
    died_as = CASE state WHEN 'discarded' THEN died_as END
WHERE letter_id = ANY (%(ids)s)
    AND (state = 'discarded' OR (state = 'replayed' AND delivered_at IS NULL AND outcome IS NULL))
RETURNING letter_id

-- purge_old --
DELETE FROM {schema}.dead_letters WHERE letter_id IN (
    SELECT k.letter_id
    FROM unnest(ARRAY['replayed', 'discarded', 'replaying', 'dead']) AS s(state)
    CROSS JOIN LATERAL (
        SELECT l.letter_id, l.died_at FROM {schema}.dead_letters l
        WHERE l.state = s.state AND l.died_at < %(cut)s
        ORDER BY l.died_at, l.letter_id LIMIT %(limit)s
    ) k
    ORDER BY k.died_at, k.letter_id LIMIT %(limit)s
)
RETURNING letter_id, state, cell

-- purge_excess -- Those that were dealt with first, then the oldest; what is being replayed stays.
DELETE FROM {schema}.dead_letters WHERE letter_id IN (
    SELECT k.letter_id
    FROM unnest(ARRAY['replayed', 'discarded', 'dead']) WITH ORDINALITY AS s(state, rank)
    CROSS JOIN LATERAL (
        SELECT l.letter_id, l.died_at FROM {schema}.dead_letters l
        WHERE l.state = s.state ORDER BY l.died_at, l.letter_id LIMIT %(limit)s
    ) k
    ORDER BY s.rank, k.died_at, k.letter_id LIMIT %(limit)s
)
RETURNING letter_id, state, cell

-- total --
SELECT coalesce(sum(n), 0)::bigint, EXISTS (
    SELECT FROM unnest(ARRAY['replayed', 'discarded', 'replaying', 'dead']) AS s(state)
    JOIN {schema}.dead_letters l ON l.state = s.state AND l.died_at < %(cut)s
) FROM {schema}.letter_counts

-- lock_cells -- No letter can be put while a cell that seems empty is removed.
LOCK TABLE {schema}.cells IN SHARE ROW EXCLUSIVE MODE

-- empty_cells --
WITH gone AS (
    DELETE FROM {schema}.cells c
    WHERE cell = ANY (%(cells)s) AND NOT EXISTS (SELECT FROM {schema}.dead_letters l WHERE l.cell = c.cell)
    RETURNING cell
)
DELETE FROM {schema}.letter_counts WHERE cell IN (SELECT cell FROM gone)

-- forget_numbers --
DELETE FROM {schema}.replay_numbers WHERE message_id IN (
    SELECT message_id FROM {schema}.replay_numbers WHERE at < %(cut)s LIMIT 1000
)

-- depth --
SELECT coalesce(sum(n), 0)::bigint FROM {schema}.letter_counts WHERE state = %(state)s

-- oldest --
SELECT min(died_at) FROM {schema}.dead_letters WHERE state = %(state)s
