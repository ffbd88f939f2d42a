-- Head of every script. KEYS[1] is the namespace's meta key: it routes the call, and every other key is built from it,
-- so that all keys of a script carry one hash tag.
local META = KEYS[1]
local BASE = string.sub(META, 1, -1 - #':meta')
local LIVE, BATCHES, CLAIMS_HELD, FAMILIES = BASE .. ':live', BASE .. ':seq', BASE .. ':n', BASE .. ':gen'

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- True if the incarnation has a lease entry, expired or not, in the content of the store that it was registered in.
-- An empty index_id stands for "not known". The check rules out that a writer that has not noticed yet that the store
-- was emptied writes for another incarnation which got the same id from a store that had forgotten it.
local function may_write(incarnation, index_id)
  if index_id ~= '' and index_id ~= redis.call('HGET', META, 'index_id') then
    return false
  end
  return redis.call('ZSCORE', LIVE, incarnation) ~= false
end
