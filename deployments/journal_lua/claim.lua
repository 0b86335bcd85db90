-- Take the next program that nobody runs: the longest-lapsed lease, else the head of the queue.
-- ARGV: lease in ms, runner, '1' to take lapsed leases. Returns {id, token} or false.
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
while true do
  local id = ARGV[3] == '1'
      and redis.call('ZRANGEBYSCORE', 'continuum:programs:leases', '-inf', now_ms, 'LIMIT', 0, 1)[1]
    or redis.call('ZRANGE', 'continuum:programs:queue', 0, 0)[1]
  if not id then return false end
  local program = 'continuum:program:' .. id
  redis.call('ZREM', 'continuum:programs:queue', id)
  if redis.call('EXISTS', program) == 1 then
    redis.call('HSET', program, 'runner', ARGV[2])
    redis.call('ZADD', 'continuum:programs:leases', now_ms + ARGV[1], id)
    return {id, redis.call('HINCRBY', program, 'token', 1)}
  end
  -- A name in the queue without a program: what the store has lost is not brought back.
  redis.call('ZREM', 'continuum:programs:leases', id)
end
