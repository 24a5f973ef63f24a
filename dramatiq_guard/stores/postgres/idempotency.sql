-- The statements of the PostgreSQL store of idempotency keys, by name.
--
-- Each is a transaction of its own, and judges by one look at the server's clock.  A statement sees the table as it was
-- when it began.  One that was to write and found that a row had changed meanwhile writes nothing and returns no row:
-- then it is run again.

-- clock --
clock AS MATERIALIZED (SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint AS now)

-- judged -- What a claim of a key comes to; no row where there is none.
{clock}, judged AS MATERIALIZED (
    SELECT k.*, CASE
        WHEN NOT live THEN 'fresh'
        WHEN %(strict)s::boolean AND NOT same THEN 'mismatch'
        WHEN state = 'free' THEN 'fresh'
        WHEN state <> 'held' THEN state
        WHEN owner = %(owner)s::text THEN 'again'
        WHEN lease_until > looked_at THEN 'busy'
        WHEN %(park)s::boolean THEN 'park'
        ELSE 'takeover'
    END AS answer
    FROM (
        SELECT k.*, now AS looked_at, greatest(k.expires_at, k.lease_until) > now AS live,
            coalesce(k.fingerprint = %(fingerprint)s::bytea, true) AS same
        FROM {schema}.keys AS k, clock WHERE k.key = %(key)s::text
    ) AS k
)

-- claim -- Whoever only reads neither locks nor writes.  The lock is what an open inbox holds.  A holder may ask again.
WITH {judged}, locked AS MATERIALIZED (
    SELECT pg_try_advisory_xact_lock(%(lock)s::bigint) AS got FROM clock LEFT JOIN judged ON true
    WHERE coalesce(answer, 'fresh') IN ('fresh', 'takeover', 'again', 'park')
), taken AS (
    INSERT INTO {schema}.keys AS k (key, state, fence, owner, lease_until, fingerprint, attempts, crashes, steps, flags,
        first_claim_at, expires_at)
    SELECT %(key)s::text,
        CASE answer WHEN 'park' THEN 'parked' ELSE 'held' END,
        CASE WHEN answer IN ('park', 'again') THEN fence ELSE nextval('{schema}.fences') END,
        CASE answer WHEN 'park' THEN owner ELSE %(owner)s::text END,
        CASE answer WHEN 'park' THEN lease_until ELSE clock.now + %(lease)s::bigint END,
        CASE WHEN answer = 'park' THEN fingerprint WHEN live THEN coalesce(%(fingerprint)s::bytea, fingerprint)
            ELSE %(fingerprint)s::bytea END,
        CASE WHEN live THEN attempts + (answer IN ('fresh', 'takeover'))::integer ELSE 1 END,
        CASE WHEN live THEN crashes + (answer IN ('takeover', 'park'))::integer ELSE 0 END,
        CASE WHEN live THEN steps END,
        0,
        CASE WHEN live THEN first_claim_at ELSE clock.now END,
        clock.now + %(lease)s::bigint + %(retention)s::bigint
    FROM locked CROSS JOIN clock LEFT JOIN judged ON true
    WHERE got AND (%(durable)s::boolean OR set_config('synchronous_commit', 'off', true) IS NOT NULL)
    ON CONFLICT (key) DO UPDATE SET
        state = excluded.state, fence = excluded.fence, owner = excluded.owner, lease_until = excluded.lease_until,
        fingerprint = excluded.fingerprint, attempts = excluded.attempts, crashes = excluded.crashes,
        steps = CASE WHEN excluded.first_claim_at = k.first_claim_at THEN k.steps END, result = NULL, flags = 0,
        first_claim_at = excluded.first_claim_at, expires_at = excluded.expires_at
        WHERE (k.fence, k.state, k.lease_until) = (SELECT fence, state, lease_until FROM judged)
    RETURNING *
)
SELECT CASE answer WHEN 'park' THEN 'parked' WHEN 'takeover' THEN answer ELSE 'fresh' END, t.fence, 0,
    t.attempts, t.crashes, t.first_claim_at, now, CASE t.state WHEN 'held' THEN t.steps::text END, NULL::bytea, 0,
    NOT coalesce(live AND NOT same, false)
FROM taken AS t CROSS JOIN clock LEFT JOIN judged AS j ON true
UNION ALL
SELECT answer, fence, CASE answer WHEN 'busy' THEN lease_until - looked_at ELSE 0 END, attempts, crashes, first_claim_at,
    looked_at, NULL, CASE answer WHEN 'done' THEN result END, CASE answer WHEN 'done' THEN flags ELSE 0 END, same
FROM judged WHERE answer IN ('mismatch', 'busy', 'done', 'parked')
UNION ALL
SELECT 'busy', coalesce(fence, 0), %(lease)s::bigint, coalesce(attempts, 1), coalesce(crashes, 0),
    coalesce(first_claim_at, clock.now), clock.now, NULL, NULL, 0, NOT coalesce(live AND NOT same, false)
FROM locked CROSS JOIN clock LEFT JOIN judged ON true WHERE NOT got

-- lock -- For an inbox, in a statement of its own: the next one sees what whoever had the lock before left.
SELECT pg_try_advisory_xact_lock(%(lock)s::bigint)

-- look -- A claim that writes nothing yet.  The transaction is marked, for its end to know that it is the same one.
WITH {judged}
SELECT CASE coalesce(answer, 'fresh') WHEN 'takeover' THEN 'fresh' ELSE coalesce(answer, 'fresh') END,
    CASE WHEN coalesce(answer, 'fresh') IN ('fresh', 'takeover')
        THEN set_config('dramatiq_guard.fence', nextval('{schema}.fences')::text, true)::bigint ELSE fence END,
    CASE answer WHEN 'busy' THEN lease_until - clock.now ELSE 0 END,
    CASE WHEN answer IN ('fresh', 'takeover') AND live THEN attempts + 1 WHEN live THEN attempts ELSE 1 END,
    CASE WHEN live THEN crashes + (answer = 'takeover')::integer ELSE 0 END,
    CASE WHEN live THEN first_claim_at ELSE clock.now END,
    clock.now,
    CASE WHEN live AND answer IN ('fresh', 'takeover') THEN steps::text END,
    CASE answer WHEN 'done' THEN result END,
    CASE answer WHEN 'done' THEN flags ELSE 0 END,
    NOT coalesce(live AND NOT same, false),
    fence, state, lease_until
FROM clock LEFT JOIN judged ON true

-- mark_transaction -- For its end to know that it is the same one.
SELECT set_config('dramatiq_guard.fence', %(fence)s::bigint::text, true)

-- commit_inbox -- In the transaction of the look: an error unless it is the same one, and the row is as it was then.
WITH {clock}, whole AS MATERIALIZED (
    SELECT now, coalesce(current_setting('dramatiq_guard.fence', true), '')::bigint = %(fence)s::bigint AS ok FROM clock
), ended AS (
    INSERT INTO {schema}.keys AS k (key, state, fence, owner, lease_until, fingerprint, attempts, crashes, steps,
        result, flags, first_claim_at, expires_at)
    SELECT %(key)s::text, 'done', %(fence)s::bigint, '', 0, %(fingerprint)s::bytea, %(attempts)s::integer,
        %(crashes)s::integer, NULL, %(result)s::bytea, %(flags)s::integer, %(first_claim_at)s::bigint,
        now + %(retention)s::bigint
    FROM whole WHERE ok
    ON CONFLICT (key) DO UPDATE SET
        state = excluded.state, fence = excluded.fence, owner = '', lease_until = 0,
        fingerprint = CASE WHEN excluded.attempts > 1 THEN coalesce(excluded.fingerprint, k.fingerprint)
            ELSE excluded.fingerprint END,
        attempts = excluded.attempts, crashes = excluded.crashes,
        steps = CASE WHEN excluded.attempts > 1 THEN k.steps END, result = excluded.result, flags = excluded.flags,
        first_claim_at = excluded.first_claim_at, expires_at = excluded.expires_at
        WHERE (k.fence, k.state, k.lease_until)
            = (%(seen_fence)s::bigint, %(seen_state)s::text, %(seen_lease_until)s::bigint)
    RETURNING 1
)
SELECT ok::integer / (SELECT count(*) FROM ended) FROM whole

-- commit_key -- In a user's transaction: an error unless it is the marked one, and the key is held with this fence.
WITH {clock}, whole AS MATERIALIZED (
    SELECT now, coalesce(current_setting('dramatiq_guard.fence', true), '')::bigint = %(fence)s::bigint AS ok FROM clock
), ended AS (
    UPDATE {schema}.keys SET state = 'done', owner = '', result = %(result)s::bytea, flags = %(flags)s::integer
    FROM whole WHERE ok AND {held} RETURNING 1
)
SELECT ok::integer / (SELECT count(*) FROM ended) FROM whole

-- commit_step -- The same for a step.
WITH {clock}, whole AS MATERIALIZED (
    SELECT now, coalesce(current_setting('dramatiq_guard.fence', true), '')::bigint = %(fence)s::bigint AS ok FROM clock
), ended AS (
    UPDATE {schema}.keys SET steps = coalesce(steps, '{}') || %(step)s::jsonb FROM whole WHERE ok AND {held} RETURNING 1
)
SELECT ok::integer / (SELECT count(*) FROM ended) FROM whole

-- renew -- A renewal that a crash of the server takes back is only a shorter lease.
WITH {clock}, renewed AS (
    UPDATE {schema}.keys AS k SET lease_until = now + %(lease)s::bigint
    FROM unnest(%(keys)s::text[], %(fences)s::bigint[]) AS c (key, fence), clock
    WHERE k.key = c.key AND k.fence = c.fence AND k.state = 'held' AND greatest(k.expires_at, k.lease_until) > now
        AND set_config('synchronous_commit', 'off', true) IS NOT NULL
    RETURNING k.key, k.fence
)
SELECT key, fence FROM renewed

-- step --
WITH {clock}
UPDATE {schema}.keys SET steps = coalesce(steps, '{}') || %(step)s::jsonb FROM clock WHERE {held}

-- complete --
WITH {clock}, ended AS (
    UPDATE {schema}.keys SET state = 'done', owner = '', result = %(result)s::bytea, flags = %(flags)s::integer
    FROM clock WHERE {held} RETURNING 1
), standing AS MATERIALIZED (
    SELECT state, fence = %(fence)s::bigint AS ours, result, flags FROM {schema}.keys, clock
    WHERE key = %(key)s::text AND greatest(expires_at, lease_until) > now
), locked AS MATERIALIZED (
    SELECT pg_try_advisory_xact_lock(%(lock)s::bigint) AS got
    WHERE NOT EXISTS (SELECT FROM ended) AND NOT EXISTS (SELECT FROM standing)
), anew AS (
    INSERT INTO {schema}.keys AS k (key, state, fence, owner, lease_until, attempts, crashes, result, flags,
        first_claim_at, expires_at)
    SELECT %(key)s::text, 'done', %(fence)s::bigint, '', 0, 1, 0, %(result)s::bytea, %(flags)s::integer, now,
        now + %(retention)s::bigint
    FROM locked, clock WHERE got
    ON CONFLICT (key) DO UPDATE SET
        state = excluded.state, fence = excluded.fence, owner = '', lease_until = 0,
        fingerprint = NULL, attempts = 1, crashes = 0, steps = NULL, result = excluded.result, flags = excluded.flags,
        first_claim_at = excluded.first_claim_at, expires_at = excluded.expires_at
        WHERE greatest(k.expires_at, k.lease_until) <= excluded.first_claim_at
    RETURNING 1
)
SELECT 'done', true, NULL::bytea, 0 FROM ended
UNION ALL SELECT 'done', true, NULL, 0 FROM anew
UNION ALL SELECT 'held', false, NULL, 0 FROM locked WHERE NOT got
UNION ALL SELECT state, ours AND state = 'done', CASE WHEN state = 'done' AND NOT ours THEN result END,
    CASE WHEN state = 'done' AND NOT ours THEN flags ELSE 0 END
FROM standing WHERE NOT EXISTS (SELECT FROM ended) AND NOT (ours AND state = 'held')

-- release --
WITH {clock}
UPDATE {schema}.keys SET state = 'free' FROM clock WHERE {held}

-- park --
WITH {clock}
UPDATE {schema}.keys SET state = 'parked' FROM clock WHERE {held}

-- resolve -- With a new fence: whoever held it before has no say any more.
WITH {clock}, known AS MATERIALIZED (
    SELECT k.*, CASE WHEN state = 'held' AND lease_until > now THEN 'busy' ELSE state END AS before
    FROM {schema}.keys AS k, clock WHERE key = %(key)s::text AND greatest(expires_at, lease_until) > now
), resolved AS (
    UPDATE {schema}.keys AS k SET
        state = CASE WHEN %(done)s::boolean THEN 'done' ELSE 'free' END, fence = nextval('{schema}.fences'),
        owner = CASE WHEN %(done)s::boolean THEN '' ELSE k.owner END, crashes = k.crashes + (k.state = 'held')::integer,
        result = %(result)s::bytea, flags = %(flags)s::integer
    FROM known WHERE k.key = known.key AND before IN ('parked', 'held')
        AND (k.fence, k.state, k.lease_until) = (known.fence, known.state, known.lease_until)
    RETURNING before
)
SELECT before FROM resolved
UNION ALL SELECT before FROM known WHERE before NOT IN ('parked', 'held')
UNION ALL SELECT 'absent' WHERE NOT EXISTS (SELECT FROM known)

-- forget --
WITH {clock}, gone AS (
    DELETE FROM {schema}.keys USING clock WHERE key = %(key)s::text
    RETURNING greatest(expires_at, lease_until) > now AS live
)
SELECT 1 FROM gone WHERE live

-- get --
WITH {clock}
SELECT {record} FROM {schema}.keys AS k, clock WHERE key = %(key)s::text AND greatest(expires_at, lease_until) > now

-- page -- So many keys are looked at, however few are in the states that are asked for.
WITH {clock}, looked_at AS MATERIALIZED (
    SELECT key, state, greatest(expires_at, lease_until) > now AS live FROM {schema}.keys, clock
    WHERE key > %(after)s::text AND key >= %(from)s::text AND (%(to)s::text IS NULL OR key < %(to)s::text)
    ORDER BY key LIMIT %(look_at)s::bigint
), found AS (
    SELECT key FROM looked_at WHERE live AND (%(states)s::text[] = '{}' OR state = ANY (%(states)s::text[]))
    ORDER BY key LIMIT %(limit)s::bigint
), extent AS (
    SELECT max(key) AS last, count(*) AS n FROM looked_at
)
SELECT extent.last, extent.n, {record}
FROM extent LEFT JOIN (found JOIN {schema}.keys AS k USING (key)) ON true ORDER BY key

-- mark --
WITH {clock}
INSERT INTO {schema}.marks AS m (name, expires_at) SELECT %(name)s::text, now + %(retention)s::bigint FROM clock
ON CONFLICT (name) DO UPDATE SET expires_at = excluded.expires_at

-- marked --
WITH {clock}
SELECT 1 FROM {schema}.marks, clock WHERE name = %(name)s::text AND expires_at > now

-- reserve --
WITH {clock}, known AS MATERIALIZED (
    SELECT holder FROM {schema}.reservations, clock WHERE name = %(name)s::text AND expires_at > now
), taken AS (
    INSERT INTO {schema}.reservations AS r (name, holder, expires_at)
    SELECT %(name)s::text, %(holder)s::text, now + %(ttl)s::bigint FROM clock WHERE NOT EXISTS (SELECT FROM known)
    ON CONFLICT (name) DO UPDATE SET holder = excluded.holder, expires_at = excluded.expires_at
        WHERE r.expires_at <= excluded.expires_at - %(ttl)s::bigint
    RETURNING holder
)
SELECT holder FROM taken UNION ALL SELECT holder FROM known

-- unreserve --
WITH {clock}
DELETE FROM {schema}.reservations USING clock
WHERE name = %(name)s::text AND holder = %(holder)s::text AND expires_at > now

-- purge -- Whoever else is at it, or writes just now, is passed over.
WITH {clock}, keys_gone AS (
    DELETE FROM {schema}.keys WHERE ctid = ANY (ARRAY(
        SELECT ctid FROM {schema}.keys WHERE expires_at <= (SELECT now FROM clock)
            AND lease_until <= (SELECT now FROM clock)
        ORDER BY expires_at LIMIT %(limit)s::bigint FOR UPDATE SKIP LOCKED
    )) RETURNING 1
), marks_gone AS (
    DELETE FROM {schema}.marks WHERE ctid = ANY (ARRAY(
        SELECT ctid FROM {schema}.marks WHERE expires_at <= (SELECT now FROM clock)
        ORDER BY expires_at LIMIT %(limit)s::bigint - (SELECT count(*) FROM keys_gone) FOR UPDATE SKIP LOCKED
    )) RETURNING 1
), reservations_gone AS (
    DELETE FROM {schema}.reservations WHERE ctid = ANY (ARRAY(
        SELECT ctid FROM {schema}.reservations WHERE expires_at <= (SELECT now FROM clock)
        ORDER BY expires_at LIMIT %(limit)s::bigint - (SELECT count(*) FROM keys_gone)
            - (SELECT count(*) FROM marks_gone) FOR UPDATE SKIP LOCKED
    )) RETURNING 1
)
SELECT (SELECT count(*) FROM keys_gone) + (SELECT count(*) FROM marks_gone) + (SELECT count(*) FROM reservations_gone)

-- posture --
WITH {clock}
SELECT system_identifier::text, now,
    current_setting('fsync')::boolean AND current_setting('synchronous_commit') <> 'off'
FROM clock, pg_control_system()
