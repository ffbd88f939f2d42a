-- commit: writes what a proxy decided about one request, pending claims and the proxy's load as one.
-- KEYS[1]  meta
-- ARGV[1]  place, settle or release, as index/base.py says
-- ARGV[2]  request id, 12 bytes
-- ARGV[3]  incarnation
-- ARGV[4]  boundary hashes, 16 hex digits each
-- ARGV[5]  ms from now until its claims end; not used by release
-- ARGV[6]  writer of its load record: id of the proxy process, 8 bytes
-- ARGV[7]  version of its load record
-- ARGV[8]  payload of its load record
-- Returns  {place, run, ..}: what other requests had pending there before: number of the boundary, counted from 1, and
--          the live incarnations, u32 big-endian each
-- Cost     about 15 us, and 4 a boundary, of which the longest prompt has 28
-- Race     two proxies that place equal prompts at once: the second one is told of the first.
--          The request id tells a late call from the owner's: a settle or release that comes after another request took
--          the entry over leaves it as it is, and so does a release on an incarnation that the request was moved from.
--          A move is one call: no moment sees the request on two incarnations, or on none.
--          The version keeps a call that was delayed from writing over a newer load of the same proxy.
--          An incarnation without a lease entry gets neither: what was retired stays gone.
local ENTRY = '>I4I8c' .. REQUEST_ID_BYTES
local verb, request, incarnation = ARGV[1], ARGV[2], tonumber(ARGV[3])
local now = now_ms()
local end_ms = now + ARGV[5]
local keys, values, leases = {}, {}, {}
local entries_by_value = {}

-- Fills `keys` and `values` by boundary, `entries_by_value` with those that have not expired, and `leases` by
-- incarnation, nil where there is no lease entry. Boundaries of one prompt mostly have one value: each is read once.
local function read()
  for at = 1, #ARGV[4], 16 do
    keys[#keys + 1] = BASE .. ':p:' .. string.sub(ARGV[4], at, at + 15)
  end
  local ids, seen = {incarnation}, {[incarnation] = true}
  for place, value in ipairs(#keys > 0 and redis.call('MGET', unpack(keys)) or {}) do
    values[place] = value or ''
    if not entries_by_value[values[place]] then
      local entries = {}
      for at = 1, #values[place] - PENDING_BYTES + 1, PENDING_BYTES do
        local id, its_end_ms, its_request = struct.unpack(ENTRY, value, at)
        if its_end_ms > now then
          entries[#entries + 1] = {incarnation = id, end_ms = its_end_ms, request = its_request}
          if not seen[id] then
            seen[id] = true
            ids[#ids + 1] = id
          end
        end
      end
      entries_by_value[values[place]] = entries
    end
  end
  for at, lease in ipairs(redis.call('ZMSCORE', LIVE, unpack(ids))) do
    leases[ids[at]] = lease and tonumber(lease) or nil
  end
end

-- The live incarnations in entries of other requests.
local function others_in(entries)
  local run = {}
  for _, entry in ipairs(entries) do
    if entry.request ~= request and (leases[entry.incarnation] or 0) > now then
      run[#run + 1] = struct.pack('>I4', entry.incarnation)
    end
  end
  return table.concat(run)
end

-- Appends this request's entry. What it takes over goes, so do its entries on other incarnations and those of
-- incarnations that are gone, and if there are MOST_PENDING still, the one that ends first.
local function place_own(entries)
  local first = 1
  for at = #entries, 1, -1 do
    local entry = entries[at]
    if entry.incarnation == incarnation or entry.request == request or not leases[entry.incarnation] then
      table.remove(entries, at)
    end
  end
  if not leases[incarnation] then
    return
  end
  for at, entry in ipairs(entries) do
    first = entry.end_ms < entries[first].end_ms and at or first
  end
  if #entries == MOST_PENDING then
    table.remove(entries, first)
  end
  entries[#entries + 1] = {incarnation = incarnation, end_ms = end_ms, request = request}
end

-- Moves this request's entry on its incarnation to the end, cut, or removes it. False if there is none, or another
-- request took it over.
local function end_own(entries)
  for at, entry in ipairs(entries) do
    if entry.incarnation == incarnation and entry.request == request then
      table.remove(entries, at)
      if verb == 'settle' then
        entry.end_ms = math.min(entry.end_ms, end_ms)
        entries[#entries + 1] = entry
      end
      return true
    end
  end
  return false
end

-- What becomes of a value: who else stands in it, whether it changes, the new one, and ms until all in it has ended.
local function outcome_of(entries)
  local outcome = {others = others_in(entries), changes = true}
  if verb == 'place' then
    place_own(entries)
  else
    outcome.changes = end_own(entries)
  end
  local packed, last_end = {}, 0
  for at, entry in ipairs(entries) do
    packed[at] = struct.pack(ENTRY, entry.incarnation, entry.end_ms, entry.request)
    last_end = math.max(last_end, entry.end_ms)
  end
  outcome.value, outcome.left_ms = table.concat(packed), string.format('%.0f', last_end - now)
  return outcome
end

read()
local load_at, load = load_key(ARGV[3]), false
if leases[incarnation] then
  load = load_with(redis.call('GET', load_at), ARGV[6], ARGV[7], ARGV[8], now)
end
local outcomes, answer = {}, {}
for value, entries in pairs(entries_by_value) do
  outcomes[value] = outcome_of(entries)
end
for place, key in ipairs(keys) do
  local outcome = outcomes[values[place]]
  if outcome.others ~= '' then
    answer[#answer + 1], answer[#answer + 2] = place, outcome.others
  end
  if outcome.changes and outcome.value == '' then
    redis.call('DEL', key)
  elseif outcome.changes then
    redis.call('SET', key, outcome.value, 'PX', outcome.left_ms)
  end
end
if load then
  write_load(load_at, load)
end
return answer
