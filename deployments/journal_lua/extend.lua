-- Keep leases alive. ARGV: lease in ms, then id and token of each claim. Returns 'held', 'cancel_requested' or 'lost' for each.
local time = redis.call('TIME')
local until_ms = time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[1]
local statuses = {}
for position = 2, #ARGV, 2 do
  local id, token = ARGV[position], ARGV[position + 1]
  local held = redis.call('HMGET', 'continuum:program:' .. id, 'token', 'cancel', 'state')
  if held[1] ~= token or not redis.call('ZSCORE', 'continuum:programs:leases', id) then
    statuses[#statuses + 1] = 'lost'
  else
    -- One that waits for its client has been put down, for longer than a lease.
    if held[3] ~= 'requires_action' then redis.call('ZADD', 'continuum:programs:leases', until_ms, id) end
    statuses[#statuses + 1] = held[2] and 'cancel_requested' or 'held'
  end
end
return statuses
