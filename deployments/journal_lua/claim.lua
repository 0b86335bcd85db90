-- Take the next program that nobody runs: the longest-lapsed lease, else the head of the queue.
-- ARGV: lease in ms, runner, '1' to take lapsed leases, and until when (ms of this server's clock, '' for ever): a command that
-- was on its way for long, because the server stood still, must not take what the living have not had time to extend.
-- Returns {ms of this server's clock, id, token} or {ms}.
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local takes_lapsed = ARGV[3] == '1' and (ARGV[4] == '' or now_ms <= tonumber(ARGV[4]))
while true do
  local id = takes_lapsed
      and redis.call('ZRANGEBYSCORE', 'continuum:programs:leases', '-inf', now_ms, 'LIMIT', 0, 1)[1]
    or redis.call('ZRANGE', 'continuum:programs:queue', 0, 0)[1]
  if not id then return {now_ms} end
  local program = 'continuum:program:' .. id
  redis.call('ZREM', 'continuum:programs:queue', id)
  if redis.call('EXISTS', program) == 1 then
    redis.call('HSET', program, 'runner', ARGV[2])
    redis.call('ZADD', 'continuum:programs:leases', now_ms + ARGV[1], id)
    return {now_ms, id, redis.call('HINCRBY', program, 'token', 1)}
  end
  -- A name in the queue without a program: what the store has lost is not brought back.
  redis.call('ZREM', 'continuum:programs:leases', id)
end
