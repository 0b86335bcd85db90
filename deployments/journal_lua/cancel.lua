-- Ask for a program's end; one that is still queued ends here and now.
-- ARGV: id, seq of the last step, the step, the record that it leads to, number of counters, name and amount of each.
-- Returns 'OK', 'GONE' or the final state that the program is in.
local id, seq, step, record, counters = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
local program = 'continuum:program:' .. id
local held = redis.call('HMGET', program, 'state', 'order')
local state = held[1]
if not state then return 'GONE' end
if redis.call('ZSCORE', 'continuum:programs:finished', id) then return state end
redis.call('HSET', program, 'cancel', '1')
if state == 'requires_action' then -- no runner has it: the next claim takes it
  redis.call('ZADD', 'continuum:programs:leases', 0, id)
  redis.call('PUBLISH', 'continuum:signal:queued', '1')
end
if redis.call('ZREM', 'continuum:programs:queue', id) == 1 then
  redis.call('XADD', program .. ':steps', seq .. '-0', 's', step)
  redis.call('HSET', program, 'record', record, 'state', 'cancelled', 'seq', seq)
  redis.call('ZREM', 'continuum:programs:in:' .. state, id)
  redis.call('ZADD', 'continuum:programs:in:cancelled', held[2], id)
  redis.call('ZADD', 'continuum:programs:finished', redis.call('TIME')[1], id)
  for position = 0, counters - 1 do
    redis.call('HINCRBYFLOAT', 'continuum:programs:counters', ARGV[6 + 2 * position], ARGV[7 + 2 * position])
  end
end
redis.call('PUBLISH', 'continuum:signal:cancels', '1')
redis.call('PUBLISH', 'continuum:signal:program:' .. id, '1')
return 'OK'
