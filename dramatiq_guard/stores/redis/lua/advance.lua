-- Notes that what came before this sequence is settled.
-- ARGV: sequence, now, how long a record is kept

local sequence, now, kept = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local was = known(now, kept)
if was and was.sequence >= sequence then
  keep(string.format("%.0f", was.sequence), was.fork, math.max(now, was.at), kept)
else
  keep(ARGV[1], nil, was and math.max(now, was.at) or now, kept)
end
return 1
