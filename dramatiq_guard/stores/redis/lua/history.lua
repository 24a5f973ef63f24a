-- KEYS[1]: the liveness of processes.  ARGV: the message.
local base = string.sub(KEYS[1], 1, -6)
local open = {}
local alive = redis.call("zrange", KEYS[1], 0, -1, "WITHSCORES")
for at = 1, #alive, 2 do
    local begun = redis.call("hget", base .. ":starts:" .. alive[at], ARGV[1])
    if begun then
        local who = redis.call("hget", base .. ":who", alive[at]) or ""
        open[#open + 1] = begun .. " " .. alive[at] .. " " .. who
        open[#open + 1] = alive[at + 1]
    end
end
return {redis.call("lrange", base .. ":of:" .. ARGV[1], 0, -1), open}
