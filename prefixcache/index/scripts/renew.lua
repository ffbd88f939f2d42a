-- renew: extends the lease of an incarnation, also of one whose lease expired; never brings back one that has none.
-- Writes the worker's load.
-- KEYS[1]  meta
-- ARGV[1]  incarnation
-- ARGV[2]  index_id it was registered in, '' if not known
-- ARGV[3]  length of the lease in ms
-- ARGV[4]  version of the worker's load record
-- ARGV[5]  payload of the worker's load record, '' for none
-- Returns  1, or 0 if it has no lease entry
-- Cost     about 8 us, with load 14
-- Race     a renewal that meets a removal (or an emptied store) cannot write the lease anew, nor the load.
if not may_write(ARGV[1], ARGV[2]) then
  return 0
end
local now, key, load = now_ms(), load_key(ARGV[1]), false
if ARGV[5] ~= '' then
  load = load_with(redis.call('GET', key), WORKER_WRITER, ARGV[4], ARGV[5], now)
end
redis.call('ZADD', LIVE, 'XX', string.format('%.0f', now + ARGV[3]), ARGV[1])
if load then
  write_load(key, load)
end
return 1
