-- KEYS[1]: the liveness of processes; its name is what the other keys' begin with.
-- ARGV: the time; how long crashes are kept, in milliseconds.
local base = string.sub(KEYS[1], 1, -6)
local found = 0
for _, process in ipairs(redis.call("zrangebyscore", KEYS[1], "-inf", ARGV[1], "LIMIT", 0, 100)) do
    local starts = redis.call("hgetall", base .. ":starts:" .. process)
    local who = redis.call("hget", base .. ":who", process) or ""
    for at = 1, #starts, 2 do
        local key = base .. ":of:" .. starts[at]
        redis.call("rpush", key, starts[at + 1] .. " " .. process .. " " .. who)
        redis.call("ltrim", key, -100, -1)
        redis.call("pexpire", key, ARGV[2])
        local last = redis.call("zscore", base .. ":suspects", starts[at])
        if not last or tonumber(last) < tonumber(starts[at + 1]) then
            redis.call("zadd", base .. ":suspects", starts[at + 1], starts[at])
        end
        found = found + 1
    end
    redis.call("del", base .. ":starts:" .. process)
    redis.call("hdel", base .. ":who", process)
    redis.call("zrem", KEYS[1], process)
end
return found
