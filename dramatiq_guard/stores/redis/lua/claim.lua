-- Whether this fork may run at this sequence: 1 if it may.
-- ARGV: sequence, fork, now, how long a record is kept

local sequence, fork, now, kept = tonumber(ARGV[1]), ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local was = known(now, kept)
if was then
  if was.sequence > sequence then return 0 end
  if was.sequence == sequence and was.fork and was.fork ~= fork then return 0 end
  now = math.max(now, was.at)
end
keep(ARGV[1], fork, now, kept)
return 1
