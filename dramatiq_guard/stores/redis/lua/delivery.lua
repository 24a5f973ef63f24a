-- What `claim` and `advance` share; it is put in front of both.
--
--   KEYS[1]   prefix:delivery:{<message id>}, a hash that expires by itself; one key a message, so that a cluster
--             spreads them.  s: the sequence; f: the fork that has it, absent where none has; at: the last write.
--
-- The clock is the caller's, as everywhere; the server's own only removes what nobody asks for any more.

local key = KEYS[1]

local function known(now, kept)
  local was = redis.call("HMGET", key, "s", "f", "at")
  if not was[1] or tonumber(was[3]) <= now - kept then return nil end
  return { sequence = tonumber(was[1]), fork = was[2], at = tonumber(was[3]) }
end

local function keep(sequence, fork, now, kept)
  redis.call("HSET", key, "s", sequence, "at", string.format("%.0f", now))
  if fork then redis.call("HSET", key, "f", fork) else redis.call("HDEL", key, "f") end
  redis.call("PEXPIRE", key, kept)
end
