-- Write a record in place of the former one, if that is still there; else give what is there, and the time.
-- ARGV: the former record ('' for none), the new one, how long it is kept

local was = redis.call('GET', KEYS[1])
if (was or '') ~= ARGV[1] then return {0, was, milliseconds()} end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
return {1, ARGV[2], 0}
