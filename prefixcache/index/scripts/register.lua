-- register: gives a new incarnation its id, its first lease and batch number 0.
-- KEYS[1]  meta
-- ARGV[1]  length of the lease in ms
-- ARGV[2]  random index_id, written where none stands
-- ARGV[3]  scheme version, written where none stands
-- ARGV[4]  an id given to this writer before, 0 if none: the new one is greater
-- Returns  {incarnation, index_id}
-- Cost     constant, about 10 us
-- Race     two workers that start at once get different ids; id, lease and batch number appear together, so that no
--          apply can meet half of them. The clock keeps ids unused after the store was emptied or rewound.
local SECONDS_BEFORE_2025 = 1735689600
local MOST = 2 ^ INCARNATION_BITS - 2
local now = now_ms()
local last = tonumber(string.match(redis.call('HGET', META, 'last_id') or '', '^%d+$')) or 0
local id = math.max(last + 1, tonumber(ARGV[4]) + 1, math.floor(now / 1000) - SECONDS_BEFORE_2025)
if id > MOST then
  return redis.error_reply('ERR prefixcache: incarnation ids are used up')
end
local incarnation = string.format('%d', id)
redis.call('HSET', META, 'last_id', incarnation)
redis.call('HSETNX', META, 'index_id', ARGV[2])
redis.call('HSETNX', META, 'scheme', ARGV[3])
redis.call('ZADD', LIVE, string.format('%.0f', now + ARGV[1]), incarnation)
redis.call('HSET', BATCHES, incarnation, 0)
return {id, redis.call('HGET', META, 'index_id')}
