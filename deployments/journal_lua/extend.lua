-- Keep leases alive. ARGV: lease in ms, then id and token of each claim. Returns 'held', 'cancel_requested' or 'lost' for each.
local time = redis.call('TIME')
local until_ms = time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[1]
local statuses = {}
for position = 2, #ARGV, 2 do
  local id, token = ARGV[position], ARGV[position + 1]
  local held = redis.call('HMGET', 'continuum:program:' .. id, 'token', 'cancel')
  if held[1] ~= token or not redis.call('ZSCORE', 'continuum:programs:leases', id) then
    statuses[#statuses + 1] = 'lost'
  else
    redis.call('ZADD', 'continuum:programs:leases', until_ms, id)
    statuses[#statuses + 1] = held[2] and 'cancel_requested' or 'held'
  end
end
return statuses
