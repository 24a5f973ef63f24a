-- Discards dead letters, or restores discarded ones and replays of which nothing was heard; returns the ids moved.
-- ARGV: "discard" or "restore", now, by, why, event, ids...

local verb, now, by, why, event = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local moved = {}
for i = 6, #ARGV do
  local id = ARGV[i]
  local was = redis.call("HMGET", letter_key(id), "state", "delivered_at", "outcome")
  if verb == "discard" then
    if was[1] == "dead" then
      move(id, now, "discarded", event, by, why)
      moved[#moved + 1] = id
    end
  elseif was[1] == "discarded" or (was[1] == "replayed" and not was[2] and not was[3]) then
    move(id, now, "dead", event, by, why)
    if was[1] == "replayed" then forget_replay(id) end
    moved[#moved + 1] = id
  end
end
return moved
