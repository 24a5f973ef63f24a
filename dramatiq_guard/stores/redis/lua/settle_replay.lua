-- Notes how a replay went on; returns how many of the tokens held, or -1 for an admission whose letter is no more.
-- ARGV: "finish", "abandon", "admit" or "outcome"; now; event; why; outcome or ""; then pairs of id and token

local verb, now, event, why, outcome = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local held = 0
for i = 6, #ARGV, 2 do
  local id, token = ARGV[i], ARGV[i + 1]
  local key = letter_key(id)
  local was = redis.call("HMGET", key, "state", "token", "delivered_at")
  if verb == "admit" and not was[1] then return -1 end
  if was[2] and was[2] == token then
    if verb == "abandon" then
      if was[1] == "replaying" then
        move(id, now, "dead", event, "", why)
        forget_replay(id)
        held = held + 1
      end
    else
      held = held + 1
      if verb == "finish" then redis.call("HSET", key, "enqueued_at", now) end
      if verb == "admit" and not was[3] then redis.call("HSET", key, "delivered_at", now) end
      if verb == "outcome" then
        redis.call("HSET", key, "outcome", outcome, "outcome_at", now)
        redis.call("HDEL", key, "died_as")
      end
      if was[1] == "replaying" then move(id, now, "replayed", "", "", "") end
    end
  end
end
return held
