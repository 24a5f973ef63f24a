-- KEYS[1]: the liveness of processes.  ARGV: since when; how many at most.
local base = string.sub(KEYS[1], 1, -6)
for _, message_id in ipairs(redis.call("zrangebyscore", base .. ":suspects", "-inf", "(" .. ARGV[1])) do
    redis.call("del", base .. ":of:" .. message_id)
    redis.call("zrem", base .. ":suspects", message_id)
end
local found = {}
for _, message_id in ipairs(redis.call("zrevrange", base .. ":suspects", 0, ARGV[2] - 1)) do
    local crashes = redis.call("llen", base .. ":of:" .. message_id)
    if crashes > 0 then
        found[#found + 1] = message_id
        found[#found + 1] = crashes
    else
        redis.call("zrem", base .. ":suspects", message_id)
    end
end
return found
