-- Records a step of a key that is held with this fence: 1 if it is.
-- ARGV: fence, name, value

local record = held(ARGV[1])
if not record then return 0 end
local steps = record[STEPS]
local at = #steps + 1
for i = 1, #steps, 2 do
  if steps[i] == ARGV[2] then at = i end
end
steps[at], steps[at + 1] = ARGV[2], ARGV[3]
keep(record)
return 1
