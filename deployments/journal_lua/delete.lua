-- Forget a program that has ended. ARGV: id. Returns 'OK', 'GONE' or the state that it is in.
local id = ARGV[1]
local program = 'continuum:program:' .. id
local state = redis.call('HGET', program, 'state')
if not state then
  redis.call('ZREM', 'continuum:programs:finished', id)
  return 'GONE'
end
if not redis.call('ZSCORE', 'continuum:programs:finished', id) then return state end
redis.call('DEL', program, program .. ':steps')
redis.call('ZREM', 'continuum:programs:all', id)
redis.call('ZREM', 'continuum:programs:in:' .. state, id)
redis.call('ZREM', 'continuum:programs:finished', id)
redis.call('PUBLISH', 'continuum:signal:program:' .. id, '1')
return 'OK'
