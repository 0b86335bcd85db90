-- Forget a program that has ended. ARGV: id. Returns 'OK', 'GONE' or the state that it is in.
local id = ARGV[1]
local program = 'continuum:program:' .. id
local held = redis.call('HMGET', program, 'state', 'tenant')
local state = held[1]
if not state then
  redis.call('ZREM', 'continuum:programs:finished', id)
  return 'GONE'
end
if not redis.call('ZSCORE', 'continuum:programs:finished', id) then return state end
redis.call('DEL', program, program .. ':steps')
redis.call('ZREM', 'continuum:programs:all', id)
redis.call('ZREM', 'continuum:programs:in:' .. state, id)
if held[2] then redis.call('ZREM', 'continuum:programs:of:' .. held[2], id) end -- older programs have no tenant
redis.call('ZREM', 'continuum:programs:finished', id)
redis.call('PUBLISH', 'continuum:signal:program:' .. id, '1')
return 'OK'
