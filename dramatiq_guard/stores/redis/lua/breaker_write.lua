-- KEYS[1]: the record.  ARGV: the version it must still have; the new record; for how many milliseconds it is kept.
if (redis.call("hget", KEYS[1], "version") or "0") ~= ARGV[1] then
    return 0
end
redis.call("hset", KEYS[1], "version", ARGV[1] + 1, "record", ARGV[2])
redis.call("pexpire", KEYS[1], ARGV[3])
return 1
