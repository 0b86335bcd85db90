-- Accept a program. ARGV: id, spec, record, first step, queue bound, idempotency key or '', fingerprint, key's seconds, tenant.
-- Returns {'OK'}, {'KNOWN', id}, {'MISMATCH'}, {'EXISTS'} or {'FULL'}.
local id, spec, record, step = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local queued_max, idempotency, fingerprint, keep_s = tonumber(ARGV[5]), ARGV[6], ARGV[7], ARGV[8]
local tenant = ARGV[9]
local program = 'continuum:program:' .. id

if idempotency ~= '' then
  local known = redis.call('HMGET', idempotency, 'fingerprint', 'program')
  if known[1] then
    if known[1] ~= fingerprint then return {'MISMATCH'} end
    if redis.call('EXISTS', 'continuum:program:' .. known[2]) == 1 then return {'KNOWN', known[2]} end
  end
end
if redis.call('EXISTS', program) == 1 then
  -- The very same spec is this call again, after its answer got lost.
  if redis.call('HGET', program, 'spec') == spec then return {'OK'} end
  return {'EXISTS'}
end
if redis.call('ZCARD', 'continuum:programs:queue') >= queued_max then return {'FULL'} end

local order = redis.call('INCR', 'continuum:programs:order')
redis.call('HSET', program, 'spec', spec, 'record', record, 'state', 'queued', 'seq', 1, 'token', 0, 'order', order,
  'tenant', tenant)
redis.call('XADD', program .. ':steps', '1-0', 's', step)
redis.call('ZADD', 'continuum:programs:queue', order, id)
redis.call('ZADD', 'continuum:programs:all', order, id)
redis.call('ZADD', 'continuum:programs:in:queued', order, id)
redis.call('ZADD', 'continuum:programs:of:' .. tenant, order, id)
if idempotency ~= '' then
  redis.call('HSET', idempotency, 'fingerprint', fingerprint, 'program', id)
  redis.call('EXPIRE', idempotency, keep_s)
end
redis.call('PUBLISH', 'continuum:signal:queued', '1')
return {'OK'}
