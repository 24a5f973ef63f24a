-- The statements of the PostgreSQL store of crashes, by name.

-- live --
INSERT INTO {schema}.processes (process, host, pid, until) VALUES (%(process)s, %(host)s, %(pid)s, %(until)s)
ON CONFLICT (process) DO UPDATE SET host = excluded.host, pid = excluded.pid, until = excluded.until

-- leave --
WITH left_now AS (DELETE FROM {schema}.processes WHERE process = %(process)s)
DELETE FROM {schema}.starts WHERE process = %(process)s

-- start -- Sent without waiting, with numbered parameters.
INSERT INTO {schema}.starts (message_id, process, at) VALUES ($1, $2, $3)
ON CONFLICT (message_id, process) DO UPDATE SET at = excluded.at

-- finish -- The same; what is finished is a JSON array.
DELETE FROM {schema}.starts WHERE process = $1 AND message_id IN (SELECT jsonb_array_elements_text($2))

-- finish_and_start -- Both in one; what is started must not be among what is finished.
WITH finished AS (
    DELETE FROM {schema}.starts WHERE process = $2 AND message_id IN (SELECT jsonb_array_elements_text($4))
)
INSERT INTO {schema}.starts (message_id, process, at) VALUES ($1, $2, $3)
ON CONFLICT (message_id, process) DO UPDATE SET at = excluded.at

-- inquest -- Of two at once each process is found by one; the other passes over it.
WITH dead AS (
    DELETE FROM {schema}.processes WHERE process IN (
        SELECT process FROM {schema}.processes WHERE until <= %(now)s LIMIT 100 FOR UPDATE SKIP LOCKED
    ) RETURNING process, host, pid
), begun AS (
    DELETE FROM {schema}.starts AS s USING dead AS d WHERE s.process = d.process
    RETURNING s.message_id, s.process, s.at, d.host, d.pid
), counted AS (
    INSERT INTO {schema}.crashes (message_id, process, at, host, pid)
    SELECT message_id, process, at, host, pid FROM begun
    ON CONFLICT (message_id, process) DO UPDATE SET at = excluded.at
    RETURNING 1
)
SELECT count(*) FROM counted

-- suspects -- Forgets, on the way, those whose last crash is too long ago.
WITH forgotten AS (
    DELETE FROM {schema}.crashes WHERE (message_id, process) IN (
        SELECT message_id, process FROM {schema}.crashes AS c
        WHERE at < %(since)s AND NOT EXISTS (
            SELECT FROM {schema}.crashes AS later WHERE later.message_id = c.message_id AND later.at >= %(since)s
        ) FOR UPDATE SKIP LOCKED
    )
)
SELECT message_id, count(*) FROM {schema}.crashes
GROUP BY message_id HAVING max(at) >= %(since)s ORDER BY max(at) DESC LIMIT %(limit)s

-- history --
SELECT at, process, host, pid, NULL AS until FROM {schema}.crashes
WHERE message_id = %(message_id)s AND at >= %(since)s
UNION ALL
SELECT s.at, s.process, p.host, p.pid, p.until FROM {schema}.starts AS s JOIN {schema}.processes AS p USING (process)
WHERE s.message_id = %(message_id)s

-- forgive --
DELETE FROM {schema}.crashes WHERE message_id = %(message_id)s
