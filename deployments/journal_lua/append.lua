-- Journal steps and the record that they lead to: a runner's, if its token is the latest; a client's (token 'client'), if the
-- program waits for its client, which then goes on at once when the record says that it waits no more.
-- ARGV: id, token, seq of the first step, number of steps, record, its state, '1' if final, number of counters,
--       the steps, then name and amount of each counter. Returns 'OK', 'LOST' or 'GONE'.
local id, token, first, count = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local record, state, is_final, counters = ARGV[5], ARGV[6], ARGV[7] == '1', tonumber(ARGV[8])
local program, is_client = 'continuum:program:' .. id, token == 'client'
local held = redis.call('HMGET', program, 'token', 'seq', 'state', 'order')
if is_client then
  if not held[3] then return 'GONE' end
  if held[3] ~= 'requires_action' then return 'LOST' end
elseif held[1] ~= token then
  return 'LOST'
end
local seq = tonumber(held[2])
if not is_client and seq == first + count - 1 then return 'OK' end -- the same again, after its answer got lost
if seq + 1 ~= first or not redis.call('ZSCORE', 'continuum:programs:leases', id) then return 'LOST' end

for position = 0, count - 1 do
  redis.call('XADD', program .. ':steps', (first + position) .. '-0', 's', ARGV[9 + position])
end
redis.call('HSET', program, 'record', record, 'state', state, 'seq', first + count - 1)
if held[3] ~= state then
  redis.call('ZREM', 'continuum:programs:in:' .. held[3], id)
  redis.call('ZADD', 'continuum:programs:in:' .. state, held[4], id)
end
if is_final then
  redis.call('ZREM', 'continuum:programs:leases', id)
  redis.call('ZADD', 'continuum:programs:finished', redis.call('TIME')[1], id)
elseif is_client and state ~= 'requires_action' then
  redis.call('ZADD', 'continuum:programs:leases', 0, id)
  redis.call('PUBLISH', 'continuum:signal:queued', '1')
end
for position = 0, counters - 1 do
  local at = 9 + count + 2 * position
  redis.call('HINCRBYFLOAT', 'continuum:programs:counters', ARGV[at], ARGV[at + 1])
end
redis.call('PUBLISH', 'continuum:signal:program:' .. id, '1')
return 'OK'
