-- Let the lease lapse, so that the next claim of any runner takes the program: at once, or for a program that waits for its
-- client after a time. ARGV: id, token, that time in ms.
local id, token, after_ms = ARGV[1], ARGV[2], tonumber(ARGV[3])
local held = redis.call('HMGET', 'continuum:program:' .. id, 'token', 'state', 'cancel')
if held[1] ~= token then return 0 end
if not redis.call('ZSCORE', 'continuum:programs:leases', id) then return 0 end
local until_ms = 0
if after_ms > 0 and held[2] == 'requires_action' and not held[3] then
  local time = redis.call('TIME')
  until_ms = time[1] * 1000 + math.floor(time[2] / 1000) + after_ms
end
redis.call('ZADD', 'continuum:programs:leases', until_ms, id)
redis.call('PUBLISH', 'continuum:signal:queued', '1')
return 1
