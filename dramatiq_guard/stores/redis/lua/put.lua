-- Writes a letter; returns 1 if it was new.
-- ARGV: id, died_at, cell, cell's dimensions as JSON, record, text, message_id, message_timestamp, replay_n,
--       replay_of or "", event for a letter that died again

local id, died_at, cell = ARGV[1], ARGV[2], ARGV[3]
local key = letter_key(id)
local known = redis.call("HMGET", key, "state", "died_at", "cell")

if known[1] and (known[1] == "dead" or known[1] == "replaying" or known[2] == died_at) then
  return 0
end

redis.call("HSET", key, "record", ARGV[5], "text", ARGV[6], "cell", cell, "died_at", died_at, "message_id", ARGV[7],
  "message_timestamp", ARGV[8], "replay_n", ARGV[9], "state", "dead", "since", died_at)
redis.call("HSET", base .. ":cells", cell, ARGV[4])
redis.call("ZADD", state_key("dead"), died_at, id)
redis.call("ZADD", cell_key(cell, "dead"), died_at, id)
redis.call("ZADD", unsettled_key, died_at, id)
if known[1] then
  redis.call("ZREM", state_key(known[1]), id)
  redis.call("ZREM", cell_key(known[3], known[1]), id)
  move(id, died_at, "dead", ARGV[11], "", "")
else
  redis.call("HSET", key, "by", "", "why", "", "events", "")
end

if ARGV[10] ~= "" then
  local parent = letter_key(ARGV[10])
  local sent = redis.call("HMGET", parent, "n", "state")
  if sent[1] and sent[1] == ARGV[9] then
    redis.call("HSET", parent, "outcome", "died", "outcome_at", died_at, "died_as", id)
    if sent[2] == "replaying" then move(ARGV[10], died_at, "replayed", "", "", "") end
  end
end
return 1
