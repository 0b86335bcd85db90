-- Let the lease lapse at once, so that the next claim of any runner takes the program. ARGV: id, token.
local id, token = ARGV[1], ARGV[2]
if redis.call('HGET', 'continuum:program:' .. id, 'token') ~= token then return 0 end
if not redis.call('ZSCORE', 'continuum:programs:leases', id) then return 0 end
redis.call('ZADD', 'continuum:programs:leases', 0, id)
redis.call('PUBLISH', 'continuum:signal:queued', '1')
return 1
