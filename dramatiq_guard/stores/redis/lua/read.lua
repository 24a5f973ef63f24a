-- Reads letters, the latest death first, by merging sorted sets.
-- ARGV: "letters" or "refs", limit, cursor's death or "", cursor's id, died_after or "", died_before or "",
--       text or "", how many letters a search may read, number of states, states..., the five dimensions
-- Returns {found, cursor's death or "", cursor's id}.

local want, limit, cursor_at, cursor_id = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4]
local after, before, text, allowance = ARGV[5], ARGV[6], ARGV[7], tonumber(ARGV[8])
local states = {}
for i = 1, tonumber(ARGV[9]) do states[i] = ARGV[9 + i] end
local asked, any = {}, true
for k = 1, 5 do
  asked[k] = ARGV[9 + #states + k]
  if asked[k] ~= "" then any = false end
end
local floor = after ~= "" and tonumber(after) or -math.huge

-- Lua compares strings by the server's locale, sorted sets by their bytes.
local function less(a, b)
  for i = 1, math.min(#a, #b) do
    local x, y = string.byte(a, i), string.byte(b, i)
    if x ~= y then return x < y end
  end
  return #a < #b
end

local function later(a, b)
  if a.at ~= b.at then return a.at > b.at end
  return less(b.id, a.id)
end

-- The rank of the first letter below the cursor and before `before`.
local function start_of(key)
  local start = 0
  if before ~= "" then start = redis.call("ZCOUNT", key, before, "+inf") end
  if cursor_at ~= "" then
    local low = redis.call("ZCOUNT", key, "(" .. cursor_at, "+inf")
    local high = low + redis.call("ZCOUNT", key, cursor_at, cursor_at)
    while low < high do
      local middle = math.floor((low + high) / 2)
      if less(redis.call("ZREVRANGE", key, middle, middle)[1], cursor_id) then high = middle else low = middle + 1 end
    end
    start = math.max(start, low)
  end
  return start
end

local function advance(source)
  if source.next > #source.buffer then
    source.buffer = redis.call("ZREVRANGE", source.key, source.rank, source.rank + source.chunk - 1, "WITHSCORES")
    source.rank, source.next = source.rank + source.chunk, 1
    source.chunk = math.min(source.chunk * 4, 500)
    if #source.buffer == 0 then return false end
  end
  source.id, source.at = source.buffer[source.next], tonumber(source.buffer[source.next + 1])
  source.next = source.next + 2
  return source.at >= floor
end

local heap = {}

local function sift(i)
  while true do
    local best, left = i, 2 * i
    if left <= #heap and later(heap[left], heap[best]) then best = left end
    if left + 1 <= #heap and later(heap[left + 1], heap[best]) then best = left + 1 end
    if best == i then return end
    heap[i], heap[best] = heap[best], heap[i]
    i = best
  end
end

local function open(key, chunk)
  local source = { key = key, rank = start_of(key), chunk = chunk, buffer = {}, next = 1 }
  if advance(source) then heap[#heap + 1] = source end
end

if any then
  for _, state in ipairs(states) do open(state_key(state), math.min(limit + 1, 500)) end
else
  local cells = matching_cells(asked)
  local chunk = math.max(2, math.min(math.ceil(limit / math.max(1, #cells)) + 1, 500))
  for _, cell in ipairs(cells) do
    for _, state in ipairs(states) do open(cell_key(cell, state), chunk) end
  end
end
for i = math.floor(#heap / 2), 1, -1 do sift(i) end

local found, last = {}, nil
while #heap > 0 do
  local head = heap[1]
  if #found == limit or allowance == 0 then
    return { found, last and string.format("%.0f", last.at) or cursor_at, last and last.id or cursor_id }
  end
  last = { at = head.at, id = head.id }
  local fits = true
  if text ~= "" then
    allowance = allowance - 1
    local searched = redis.call("HGET", letter_key(head.id), "text")
    fits = searched and string.find(searched, text, 1, true)
  end
  if fits then
    if want == "refs" then
      found[#found + 1] = { head.id, redis.call("HGET", letter_key(head.id), "message_timestamp") }
    else
      found[#found + 1] = read(head.id)
    end
  end
  if not advance(head) then
    heap[1] = heap[#heap]
    heap[#heap] = nil
  end
  if #heap > 0 then sift(1) end
end
return { found, "", "" }
