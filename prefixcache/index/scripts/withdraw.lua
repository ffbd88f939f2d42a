-- withdraw: removes a worker's record if it still is the one that the caller wrote.
-- KEYS[1]  the registry
-- ARGV[1]  worker id
-- ARGV[2]  the record as it was written
-- Returns  1 if it was removed, 0 if another one, or none, stands there
-- Cost     constant, about 5 us
-- Race     a worker that leaves never removes the record of the one that took its name in the meantime.
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then
  return 0
end
return redis.call('HDEL', KEYS[1], ARGV[1])
