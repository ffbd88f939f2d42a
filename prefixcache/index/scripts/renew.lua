-- renew: extends the lease of an incarnation, also of one whose lease expired; never brings back one that has none.
-- KEYS[1]  meta
-- ARGV[1]  incarnation
-- ARGV[2]  index_id it was registered in, '' if not known
-- ARGV[3]  length of the lease in ms
-- Returns  1, or 0 if it has no lease entry
-- Cost     constant, about 8 us
-- Race     a renewal that meets a removal (or an emptied store) cannot write the lease anew.
if not may_write(ARGV[1], ARGV[2]) then
  return 0
end
redis.call('ZADD', LIVE, 'XX', string.format('%.0f', now_ms() + ARGV[3]), ARGV[1])
return 1
