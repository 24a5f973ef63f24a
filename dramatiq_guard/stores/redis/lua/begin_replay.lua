-- Takes letters for a replay; returns for each {id, "" or what stood in the way, letter or {}}.
-- ARGV: now, token, owner, lease_until, by, why, event, how long a message's number is kept, ids...

local now, token = ARGV[1], ARGV[2]
local answers = {}
for i = 9, #ARGV do
  local id = ARGV[i]
  local key = letter_key(id)
  local was = redis.call("HMGET", key, "state", "n", "lease_until", "token", "message_id", "replay_n")
  local n = nil
  if was[1] == "dead" then
    local number = base .. ":number:" .. was[5]
    n = math.max(tonumber(redis.call("GET", number) or "0"), tonumber(was[6])) + 1
    redis.call("SET", number, n, "PX", ARGV[8])
  elseif was[1] == "replaying" and (was[4] == token or tonumber(was[3]) <= tonumber(now)) then
    n = was[2]
  end
  if not n then
    answers[#answers + 1] = { id, was[1] or "missing", {} }
  else
    -- A client that lost the reply and asks again gets the same answer.
    if was[1] == "dead" or was[4] ~= token then
      redis.call("HSET", key, "n", n, "token", token, "owner", ARGV[3], "lease_until", ARGV[4])
      move(id, now, "replaying", ARGV[7], ARGV[5], ARGV[6])
      redis.call("HDEL", key, "enqueued_at", "delivered_at", "outcome", "outcome_at", "died_as")
    end
    answers[#answers + 1] = { id, "", read(id) }
  end
end
return answers
