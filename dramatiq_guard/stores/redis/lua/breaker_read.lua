-- The record, and the time.

return {redis.call('GET', KEYS[1]), milliseconds()}
