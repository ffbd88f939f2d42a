-- Families: P:{ns}:gen holds the ids of each engine, u32 big-endian: the anchor, the next generation, the newest and the
-- older ones; index/family.py draws them.

-- The ids of an entry that have a lease entry; nil if the anchor has none.
local function standing_ids(entry)
  local names, ids = {}, {}
  for at = 1, #(entry or ''), 4 do
    ids[#ids + 1] = struct.unpack('>I4', entry, at)
    names[#names + 1] = string.format('%d', ids[#ids])
  end
  local leases, standing = names[1] and redis.call('ZMSCORE', LIVE, unpack(names)) or {}, {}
  for at = 1, #names do
    if leases[at] then
      standing[#standing + 1] = ids[at]
    elseif at == 1 then
      return nil
    end
  end
  return standing[1] and standing
end

-- Opens what a family always has, the next generation and the newest; false if no ids are left.
local function add_generations(ids, now, lease_ms)
  while #ids < 3 do
    local id = give_id(0, now, lease_ms)
    if not id then
      return false
    end
    table.insert(ids, 2, id)
  end
  return true
end

local function write_family(engine, ids)
  redis.call('HSET', FAMILIES, engine, struct.pack('>' .. string.rep('I4', #ids), unpack(ids)))
end

local function renew_family(ids, now, lease_ms)
  local words, lease_end = {}, string.format('%.0f', now + lease_ms)
  for at = 1, #ids do
    words[at * 2 - 1], words[at * 2] = lease_end, string.format('%d', ids[at])
  end
  redis.call('ZADD', LIVE, 'XX', unpack(words))
end

-- Claims that each of the ids holds.
local function claims_held(ids)
  local names = {}
  for at = 1, #ids do
    names[at] = string.format('%d', ids[at])
  end
  local counts = redis.call('HMGET', CLAIMS_HELD, unpack(names))
  for at = 1, #ids do
    counts[at] = tonumber(counts[at]) or 0
  end
  return counts
end

-- {claims of all, anchor, generations ..}
local function family_answer(ids)
  local answer, counts = {0}, claims_held(ids)
  for at = 1, #ids do
    answer[1] = answer[1] + counts[at]
    answer[at + 1] = ids[at]
  end
  return answer
end

-- Removes the entries of families whose anchor has no lease entry.
local function forget_families()
  local entries = redis.call('HGETALL', FAMILIES)
  for at = 1, #entries, 2 do
    if not standing_ids(entries[at + 1]) then
      redis.call('HDEL', FAMILIES, entries[at])
    end
  end
end
