-- Lists unsettled letters, the latest death first: {id, message id}...
-- ARGV: the death before which, how many

local found = {}
for _, id in ipairs(redis.call("ZREVRANGEBYSCORE", unsettled_key, "(" .. ARGV[1], "-inf", "LIMIT", 0, ARGV[2])) do
  found[#found + 1] = { id, redis.call("HGET", letter_key(id), "message_id") }
end
return found
