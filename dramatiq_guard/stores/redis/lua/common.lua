-- What the other scripts share; it is put in front of each of them.
--
--   KEYS[1]                    the base, which carries the hash tag: one slot holds everything
--   base:letter:<id>           hash: the record, what is indexed of it, and where the letter stands
--   base:state:<state>         sorted set: letter ids by death
--   base:cell:<cell>:<state>   the same for the letters of one cell
--   base:cells                 hash: cell id -> its five dimensions as JSON
--   base:number:<message id>   the number of the latest replay of a message
--   base:unsettled             sorted set: ids of letters whose messages may be delivered again, by death
--
-- Out of memory, Redis refuses only commands that add.  So each step adds first and removes last: it happens whole or
-- not at all.

local base = KEYS[1]
local unsettled_key = base .. ":unsettled"

local function letter_key(id) return base .. ":letter:" .. id end
local function state_key(state) return base .. ":state:" .. state end
local function cell_key(cell, state) return base .. ":cell:" .. cell .. ":" .. state end

local function move(id, now, state, event, by, why)
  local key = letter_key(id)
  local was = redis.call("HMGET", key, "state", "cell", "died_at", "events")
  if event ~= "" then
    local events = was[4] and was[4] ~= "" and (was[4] .. "\n" .. event) or event
    redis.call("HSET", key, "state", state, "since", now, "events", events, "by", by, "why", why)
  else
    redis.call("HSET", key, "state", state, "since", now)
  end
  if was[1] ~= state then
    redis.call("ZADD", state_key(state), was[3], id)
    redis.call("ZADD", cell_key(was[2], state), was[3], id)
    redis.call("ZREM", state_key(was[1]), id)
    redis.call("ZREM", cell_key(was[2], was[1]), id)
  end
end

local function remove(id, state)
  local cell = redis.call("HGET", letter_key(id), "cell")
  redis.call("DEL", letter_key(id))
  redis.call("ZREM", state_key(state), id)
  redis.call("ZREM", unsettled_key, id)
  if cell then
    redis.call("ZREM", cell_key(cell, state), id)
    local left = 0
    for _, each in ipairs({ "dead", "replaying", "replayed", "discarded" }) do
      left = left + redis.call("EXISTS", cell_key(cell, each))
    end
    if left == 0 then redis.call("HDEL", base .. ":cells", cell) end
  end
end

-- The standing and the record, in the order of LETTER_FIELDS in dead_letters.py.
local function read(id)
  return redis.call("HMGET", letter_key(id), "record", "state", "since", "by", "why", "events", "n", "token", "owner",
    "lease_until", "enqueued_at", "delivered_at", "outcome", "outcome_at", "died_as")
end

local function forget_replay(id)
  redis.call("HDEL", letter_key(id), "n", "token", "owner", "lease_until", "enqueued_at", "delivered_at", "outcome",
    "outcome_at", "died_as")
end

-- The cells that a filter asks for: five dimensions, each "=value", or "" where any will do.
local function matching_cells(asked)
  local found = {}
  local all = redis.call("HGETALL", base .. ":cells")
  for i = 1, #all, 2 do
    local kinds = cjson.decode(all[i + 1])
    local fits = true
    for k = 1, 5 do
      if asked[k] ~= "" and asked[k] ~= "=" .. kinds[k] then fits = false end
    end
    if fits then found[#found + 1] = all[i] end
  end
  return found
end
