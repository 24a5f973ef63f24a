-- KEYS[1]: the record.  Answers its version, the record, and the server's time in milliseconds.
local time = redis.call("time")
local kept = redis.call("hmget", KEYS[1], "version", "record")
return {kept[1] or "0", kept[2] or "", string.format("%.0f", time[1] * 1000 + math.floor(time[2] / 1000))}
