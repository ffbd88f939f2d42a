-- register: gives a new incarnation its id, its first lease and batch number 0.
-- KEYS[1]  meta
-- ARGV[1]  length of the lease in ms
-- ARGV[2]  random index_id, written where none stands
-- ARGV[3]  scheme version, written where none stands
-- ARGV[4]  an id given to this writer before, 0 if none: the new one is greater
-- Returns  {incarnation, index_id}
-- Cost     constant, about 10 us
-- Race     two workers that start at once get different ids.
local id = give_id(tonumber(ARGV[4]), now_ms(), ARGV[1])
if not id then
  return redis.error_reply(NO_IDS)
end
redis.call('HSETNX', META, 'index_id', ARGV[2])
redis.call('HSETNX', META, 'scheme', ARGV[3])
return {id, redis.call('HGET', META, 'index_id')}
