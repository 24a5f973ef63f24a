-- Notes that the work of a key is done.
-- ARGV: "fence flags retention", the last of a record that is missing; result
-- Returns 1 where it is done by this fence, and else how it stands: {state, flags, result}.

local fence, flags, retention = string.match(ARGV[1], "(%d+) (%d+) (%d+)")
fence = tonumber(fence)
local record, life = known(), nil
if not record then
  record, life = { HELD, fence, 1, 0, now, false, 0, false, {} }, tonumber(retention)
end
if record[STATE] == HELD and record[FENCE] == fence then
  finish(record, flags, given(ARGV[2]))
  keep(record, life)
end
if record[STATE] ~= DONE then return { record[STATE], 0, false } end
if record[FENCE] == fence then return 1 end
return { DONE, record[FLAGS], record[RESULT] }
