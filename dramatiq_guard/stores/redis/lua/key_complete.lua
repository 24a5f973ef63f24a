-- Notes that the work of a key is done.
-- ARGV: fence, flags, result, retention of a record that is missing
-- Returns {state, ours, flags, result}.

local fence = tonumber(ARGV[1])
local record, life = known(), nil
if not record then
  record, life = { HELD, fence, 1, 0, now, false, 0, false, {} }, tonumber(ARGV[4])
end
if record[STATE] == HELD and record[FENCE] == fence then
  finish(record, ARGV[2], given(ARGV[3]))
  keep(record, life)
end
if record[STATE] ~= DONE then return { record[STATE], 0, 0, false } end
if record[FENCE] == fence then return { DONE, 1, 0, false } end
return { DONE, 0, record[FLAGS], record[RESULT] }
