-- Decides about a key that is parked, or whose lease is over; returns where it stood.
-- ARGV: the new state, flags, result

local record = known()
if not record then return "absent" end
local state = record[STATE]
if state == FREE or state == DONE then return state end
if state == HELD then
  if record[LEASE_UNTIL] > now then return "busy" end
  record[CRASHES] = record[CRASHES] + 1
end
record[FENCE] = next_fence(record)
if ARGV[1] == DONE then finish(record, ARGV[2], given(ARGV[3])) else leave(record, FREE) end
keep(record)
return state
