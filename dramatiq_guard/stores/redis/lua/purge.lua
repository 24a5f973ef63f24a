-- Removes letters that are too old or too many; returns {by age, by count, never handled, more, ids}.
-- ARGV: the death before which a letter is too old, how many letters are kept, how many may be removed now,
--       the death before which an unsettled letter is not noted any more

local cut, keep, limit = "(" .. ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local removed, never_handled = {}, 0

local function purge(id, state)
  remove(id, state)
  removed[#removed + 1] = id
  if state == "dead" then never_handled = never_handled + 1 end
end

local aged_left = 0
for _, state in ipairs({ "replayed", "discarded", "replaying", "dead" }) do
  local ids = redis.call("ZRANGEBYSCORE", state_key(state), "-inf", cut, "LIMIT", 0, limit - #removed)
  for _, id in ipairs(ids) do purge(id, state) end
  aged_left = aged_left + redis.call("ZCOUNT", state_key(state), "-inf", cut)
end
local by_age = #removed

local total = 0
for _, state in ipairs({ "replayed", "discarded", "replaying", "dead" }) do
  total = total + redis.call("ZCARD", state_key(state))
end
local excess = total - aged_left - keep
for _, state in ipairs({ "replayed", "discarded", "dead" }) do
  local room = math.min(excess, limit - #removed)
  if room > 0 and aged_left == 0 then
    local ids = redis.call("ZRANGE", state_key(state), 0, room - 1)
    for _, id in ipairs(ids) do purge(id, state) end
    excess = excess - #ids
  end
end
redis.call("ZREMRANGEBYSCORE", unsettled_key, "-inf", "(" .. ARGV[4])
local more = (aged_left > 0 or (excess > 0 and #removed == limit)) and 1 or 0
return { by_age, #removed - by_age, never_handled, more, removed }
