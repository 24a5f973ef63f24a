-- Takes a name for so many milliseconds if nobody has it; returns who has it.
-- ARGV: holder, time to live

local holder = redis.call("GET", KEYS[1])
if holder then return holder end
redis.call("SET", KEYS[1], ARGV[1], "PX", ARGV[2])
return ARGV[1]
