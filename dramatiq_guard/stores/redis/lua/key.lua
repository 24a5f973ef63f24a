-- What the scripts of idempotency keys share; it is put in front of each of them.
--
--   KEYS[1]   prefix:key:<key>, a string: the record, packed, which expires by itself; one key each, so that a cluster
--             spreads them.  A hash would take twice the memory once a value has more than 64 bytes.
--
-- The clock is the server's alone.  Numbers are doubles: milliseconds, and fences in microseconds until the year 2255,
-- are exact.

local key = KEYS[1]
local time = redis.call("TIME")
local micros = time[1] * 1000000 + time[2]
local now = math.floor(micros / 1000)

-- Where in the record what is; the last two only while somebody holds or held it.  What is not there is false.
local STATE, FENCE, ATTEMPTS, CRASHES, FIRST_CLAIM_AT, FINGERPRINT, FLAGS, RESULT, STEPS, LEASE_UNTIL, OWNER =
  1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11
local HELD, FREE, DONE, PARKED = "h", "f", "d", "p"

local function known()
  local packed = redis.call("GET", key)
  return packed and cmsgpack.unpack(packed)
end

-- Keeps the record, for so long from now, or for as long as it had.
local function keep(record, life)
  if life then
    redis.call("SET", key, cmsgpack.pack(record), "PX", string.format("%.0f", math.max(1, life)))
  else
    redis.call("SET", key, cmsgpack.pack(record), "KEEPTTL")
  end
end

local function held(fence)
  local record = known()
  return record and record[STATE] == HELD and record[FENCE] == tonumber(fence) and record
end

local function next_fence(record)
  return math.max(record[FENCE] + 1, micros)
end

local function leave(record, state)
  record[STATE], record[LEASE_UNTIL] = state, 0
end

local function finish(record, flags, result)
  record[STATE], record[FLAGS], record[RESULT] = DONE, tonumber(flags), result
  record[LEASE_UNTIL], record[OWNER] = nil, nil
end

-- What may be missing comes behind a "=".
local function given(argument)
  return argument ~= "" and string.sub(argument, 2)
end
