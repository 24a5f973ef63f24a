-- Gives back or parks a key that is held with this fence: 1 if it is.
-- ARGV: fence, the new state

local record = held(ARGV[1])
if not record then return 0 end
leave(record, ARGV[2])
keep(record)
return 1
