-- Whether the work of a key may be done now; takes the key if so.
-- ARGV: owner, lease, retention, fingerprint, strict, park
-- Returns {answer, fence, lease left, attempts, crashes, first claim, now, same, flags, result, steps}.

local owner, lease, retention, fingerprint = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), given(ARGV[4])
local strict, park = ARGV[5] == "1", ARGV[6] == "1"

local record = known()
local same = true

local function answer(what)
  local mine = what == "fresh" or what == "takeover"
  local result = what == "done"
  return {
    what, record[FENCE], what == "busy" and record[LEASE_UNTIL] - now or 0, record[ATTEMPTS], record[CRASHES],
    record[FIRST_CLAIM_AT], now, same and 1 or 0, result and record[FLAGS] or 0, result and record[RESULT],
    mine and record[STEPS] or {},
  }
end

local fresh, again = true, false
if record then
  same = not (fingerprint and record[FINGERPRINT]) or fingerprint == record[FINGERPRINT]
  if strict and not same then return answer("mismatch") end
  if record[STATE] == DONE then return answer("done") end
  if record[STATE] == PARKED then return answer("parked") end
  again = record[STATE] == HELD and record[OWNER] == owner
  if record[STATE] == HELD and not again then
    if record[LEASE_UNTIL] > now then return answer("busy") end
    fresh = false
    record[CRASHES] = record[CRASHES] + 1
    if park then
      leave(record, PARKED)
      keep(record, lease + retention)
      return answer("parked")
    end
  end
else
  record = { HELD, 0, 0, 0, now, false, 0, false, {} }
end
if not again then
  record[STATE], record[FENCE], record[ATTEMPTS] = HELD, next_fence(record), record[ATTEMPTS] + 1
end
record[FINGERPRINT] = fingerprint or record[FINGERPRINT]
record[LEASE_UNTIL], record[OWNER] = now + lease, owner
keep(record, lease + retention)
return answer(fresh and "fresh" or "takeover")
