-- Extends the lease of a key that is held with this fence: 1 if it is.
-- ARGV: fence, lease

local record = held(ARGV[1])
if not record then return 0 end
local lease = tonumber(ARGV[2])
record[LEASE_UNTIL] = now + lease
local left = redis.call("PTTL", key)
keep(record, left >= 0 and left < lease and lease or nil)
return 1
