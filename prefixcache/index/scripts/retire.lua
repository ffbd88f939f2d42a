-- retire: ends an incarnation: its load goes, its claims are never matched again. Their count stays until the sweep.
-- KEYS[1]  meta
-- ARGV[1]  incarnation
-- ARGV[2]  index_id it was registered in, '' if not known
-- Returns  1, or 0 if it had no lease entry
-- Cost     constant, about 9 us
-- Race     an apply, renew or commit that arrives later finds no lease entry: it changes nothing, and writes no load.
if not may_write(ARGV[1], ARGV[2]) then
  return 0
end
end_incarnation(ARGV[1])
return 1
