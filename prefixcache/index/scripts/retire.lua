-- retire: ends an incarnation; its claims are never matched again. Their count stays until they are swept.
-- KEYS[1]  meta
-- ARGV[1]  incarnation
-- ARGV[2]  index_id it was registered in, '' if not known
-- Returns  1, or 0 if it had no lease entry
-- Cost     constant, about 8 us
-- Race     an apply or renew that arrives later finds no lease entry and changes nothing.
if not may_write(ARGV[1], ARGV[2]) then
  return 0
end
redis.call('ZREM', LIVE, ARGV[1])
redis.call('HDEL', BATCHES, ARGV[1])
return 1
