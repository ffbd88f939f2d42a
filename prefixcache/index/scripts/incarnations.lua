-- Ids are given here and end here. Id, lease and batch number appear together and go together, so that no script meets
-- half of them.
local SECONDS_BEFORE_2025 = 1735689600
local MOST_IDS = 2 ^ INCARNATION_BITS - 2
local NO_IDS = 'ERR prefixcache: incarnation ids are used up'
local last_id

-- The id of a new incarnation, greater than all given before and than `least`; false if there is none left. The clock
-- keeps ids unused after the store was emptied or rewound.
local function give_id(least, now, lease_ms)
  last_id = last_id or tonumber(string.match(redis.call('HGET', META, 'last_id') or '', '^%d+$')) or 0
  last_id = math.max(last_id + 1, least + 1, math.floor(now / 1000) - SECONDS_BEFORE_2025)
  if last_id > MOST_IDS then
    return false
  end
  local incarnation = string.format('%d', last_id)
  redis.call('HSET', META, 'last_id', incarnation)
  redis.call('ZADD', LIVE, string.format('%.0f', now + lease_ms), incarnation)
  redis.call('HSET', BATCHES, incarnation, 0)
  return last_id
end

-- The load goes, too; claims are never matched again, and their count stays until the sweep.
local function end_incarnation(incarnation)
  incarnation = string.format('%d', incarnation)
  redis.call('ZREM', LIVE, incarnation)
  redis.call('HDEL', BATCHES, incarnation)
  redis.call('DEL', BASE .. ':l:' .. incarnation)
end
