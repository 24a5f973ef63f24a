-- Whether the work of a key may be done now; takes the key if so.
-- ARGV: "lease retention strict park owner", fingerprint
-- Returns "answer fence lease-left attempts crashes first-claim now same flags", in one text, which clients read much
-- faster than a list; where there is a result or steps, {that, result, steps}.

local lease, retention, strict, park, owner = string.match(ARGV[1], "^(%d+) (%d+) (%d) (%d) (.*)$")
local fingerprint = given(ARGV[2])
lease, retention, strict, park = tonumber(lease), tonumber(retention), strict == "1", park == "1"

local record = known()
local same = true

local function answer(what)
  local done = what == "done"
  local text = string.format(
    "%s %.0f %.0f %.0f %.0f %.0f %.0f %d %.0f", what, record[FENCE], what == "busy" and record[LEASE_UNTIL] - now or 0,
    record[ATTEMPTS], record[CRASHES], record[FIRST_CLAIM_AT], now, same and 1 or 0, done and record[FLAGS] or 0
  )
  local result = done and record[RESULT]
  local steps = (what == "fresh" or what == "takeover") and record[STEPS] or {}
  if not result and #steps == 0 then return text end
  return { text, result, steps }
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
