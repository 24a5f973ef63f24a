-- Counts the letters of each cell: {cell's dimensions, count, first death, last death, id of the last}...
-- ARGV: died_after or "", died_before or "", number of states, states..., the five dimensions

local low = ARGV[1] ~= "" and ARGV[1] or "-inf"
local high = ARGV[2] ~= "" and ("(" .. ARGV[2]) or "+inf"
local states, asked = {}, {}
for i = 1, tonumber(ARGV[3]) do states[i] = ARGV[3 + i] end
for k = 1, 5 do asked[k] = ARGV[3 + #states + k] end

local tallies = {}
for _, cell in ipairs(matching_cells(asked)) do
  for _, state in ipairs(states) do
    local key = cell_key(cell, state)
    local count = redis.call("ZCOUNT", key, low, high)
    if count > 0 then
      local first = redis.call("ZRANGEBYSCORE", key, low, high, "WITHSCORES", "LIMIT", 0, 1)
      local last = redis.call("ZREVRANGEBYSCORE", key, high, low, "WITHSCORES", "LIMIT", 0, 1)
      tallies[#tallies + 1] = { redis.call("HGET", base .. ":cells", cell), count, first[2], last[2], last[1] }
    end
  end
end
return tallies
