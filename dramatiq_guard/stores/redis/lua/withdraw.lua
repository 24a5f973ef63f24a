-- Removes a letter that is still dead and still unsettled; returns 1 if it did.
-- ARGV: id

local id = ARGV[1]
if redis.call("HGET", letter_key(id), "state") ~= "dead" or not redis.call("ZSCORE", unsettled_key, id) then
  return 0
end
remove(id, "dead")
return 1
