-- The statements of the PostgreSQL store of breakers, by name.

-- read -- One row, whatever there is: the record and the time.
SELECT (SELECT record FROM {schema}.breakers WHERE name = %(name)s),
    (extract(epoch FROM clock_timestamp()) * 1000)::bigint

-- insert -- One row changes if there was none.
INSERT INTO {schema}.breakers (name, record) VALUES (%(name)s, %(record)s) ON CONFLICT (name) DO NOTHING

-- swap -- One row changes if the former record is still there.
UPDATE {schema}.breakers SET record = %(record)s, at = clock_timestamp() WHERE name = %(name)s AND record = %(was)s

-- names -- Those that somebody reported to lately.
SELECT name FROM {schema}.breakers WHERE at > clock_timestamp() - make_interval(secs => %(kept)s) ORDER BY name

-- forget -- One row.
DELETE FROM {schema}.breakers WHERE name = %(name)s

-- sweep -- Those that nobody has reported to for long; where names are made of messages there may be many.
DELETE FROM {schema}.breakers WHERE at <= clock_timestamp() - make_interval(secs => %(kept)s)
