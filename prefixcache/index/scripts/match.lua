-- match: the deepest live claim of each incarnation on a chain of index blocks, load and pending claims beside it.
-- KEYS[1]  meta
-- ARGV[1]  hashes of the chain, root side first, 8 bytes each
-- ARGV[2]  hashes of its boundaries, 16 hex digits each
-- ARGV[3]  candidates: further incarnations whose load is asked for, u32 big-endian each
-- Returns  {now_ms, groups, loads, pending}
--          groups   {depth, claims, ...}: a run of u32 big-endian `incarnation << 2 | tier`, each incarnation in one
--                   run only, deepest first; depth counts from 1. 256 holders of a system prompt are then one string.
--          loads    {incarnation, value, ...} of the MATCH_LOADS deepest holders (of equal ones those with the least
--                   ids) and of the candidates; expired records are the reader's to leave out
--          pending  {place, run, ...}: number of the boundary, counted from 1, and the live incarnations that have a
--                   pending claim on it, u32 big-endian each
-- Cost     one HGET a probe (9 in 128 blocks, 31 in 2,048, 43 in 8,192) and five to ten for each depth at which
--          somebody ends, two MGET; reads only
-- Race     one script sees claims, leases, load, pending claims and the shape of the buckets of one moment.
--
-- Blocks 0, 1, 3, 7, 15, 31, 63, 95, ... and the last are probed, until two in a row have no live holder; from block
-- 256 on a step is an eighth of the depth, so that a long chain costs few more probes than a short one:
--
--     probe      0 1 3 7   15      31              63              95
--     A holds    #################################
--     B holds    ##########                                              63 and 95: nobody, so nobody deeper
--
-- Whoever is held at one probe and at none beyond it ends before the next one: a binary search finds where. Claims that
-- are prefix-closed are found exactly. Of others the answer is a block that is held, never before the first lost one,
-- and one lost claim costs one step at most. A plain engine's are prefix-closed over its generations together, of which
-- one may hold a piece between two probes only: those are met on the way of the search, and the deepest of an engine is
-- exact:
--
--     gen 2      ##################
--     gen 1                        #########                             met at 47, between 31 and 63
local chain, boundaries = ARGV[1], ARGV[2]
local format = string.format
local LAST_BLOCK, LEAST_STRIDE, MOST_ARGUMENTS = #chain / 8 - 1, 32, 4000
local now = now_ms()

-- Claims are told apart by their owner, which is `incarnation << 2`. (Loops count: ipairs costs a call a turn.)
local live_by_owner, live_by_run = {}, {}

-- Reads the leases of owners not met before.
local function meet(owners)
  local names = {}
  for at = 1, #owners do
    names[at] = format('%d', owners[at] / 4)
  end
  for first = 1, #owners, MOST_ARGUMENTS do
    local ends = call('ZMSCORE', LIVE, unpack(names, first, math.min(first + MOST_ARGUMENTS - 1, #owners)))
    for at = 1, #ends do
      live_by_owner[owners[first + at - 1]] = ends[at] and tonumber(ends[at]) > now
    end
  end
end

-- The claims in a run whose owners hold a lease that has not ended.
local function live_claims(run)
  local live = live_by_run[run]
  if live then
    return live
  end
  local claims, new, num_live = claims_of(run), {}, 0
  for at = 1, #claims do
    local owner = claims[at] - claims[at] % 4
    if live_by_owner[owner] == nil then
      new[#new + 1] = owner
    end
  end
  meet(new)
  live = {}
  for at = 1, #claims do
    local claim = claims[at]
    if live_by_owner[claim - claim % 4] then
      num_live = num_live + 1
      live[num_live] = claim
    end
  end
  live_by_run[run] = live
  return live
end

local function has_live_claim(run)
  if run == '' then -- a long list that the server evicted
    return false
  end
  local first = read('>I4', run)
  return live_by_owner[first - first % 4] or #live_claims(run) > 0
end

-- Down the chain: who is held where.
local probes, runs = {}, {}
local function walk()
  local block, num_probes, num_empty = 0, 0, 0
  local before, is_live
  while block <= LAST_BLOCK and num_empty < 2 do
    local run = read_block(chain, block * 8 + 1)
    num_probes = num_probes + 1
    probes[num_probes], runs[num_probes] = block, run
    if run ~= before then
      before, is_live = run, run and has_live_claim(run)
    end
    num_empty = is_live and 0 or num_empty + 1
    if block == LAST_BLOCK then
      return
    end
    local stride = block < LEAST_STRIDE and block + 1 or math.max(LEAST_STRIDE, math.floor(block / 8))
    block = math.min(block + stride, LAST_BLOCK)
  end
end

local groups, wanted, is_wanted = {}, {}, {}
local function want_load(incarnation)
  if not is_wanted[incarnation] then
    is_wanted[incarnation] = true
    wanted[#wanted + 1] = incarnation
  end
end

-- Claims that stand in `run`, the run of a block, and in none deeper.
local function emit(block, claims, run)
  groups[#groups + 1] = block + 1
  groups[#groups + 1] = #claims * 4 == #run and run or run_of(claims)
  for at = 1, math.min(#claims, MATCH_LOADS - #wanted) do
    want_load((claims[at] - claims[at] % 4) / 4)
  end
end

-- The owner's claim in a run, if there is one.
local function claim_of(owner, run)
  local low, high = 0, #run / 4
  while low < high do
    local middle = math.floor((low + high) / 2)
    local claim = read('>I4', run, middle * 4 + 1)
    if claim < owner then
      low = middle + 1
    elseif claim < owner + 4 then
      return claim
    else
      high = middle
    end
  end
end

-- The live claims of a run whose owners were not met before.
local is_met = {}
local function meet_in(run)
  local live, claims = live_claims(run), {}
  for at = 1, #live do
    local owner = live[at] - live[at] % 4
    if not is_met[owner] then
      is_met[owner] = true
      claims[#claims + 1] = live[at]
    end
  end
  return claims
end

-- Emits claims of `run`, the run of block `held`, whose owners have none on block `absent`.
local has_engines = call('EXISTS', FAMILIES) == 1
local function narrow(held, absent, claims, run)
  while absent - held > 1 do
    local block = math.floor((held + absent) / 2)
    local there = read_block(chain, block * 8 + 1)
    if there == run then
      held = block
    elseif not there then
      absent = block
    else
      local less_deep, deeper = {}, has_engines and meet_in(there) or {}
      for at = 1, #claims do
        local found = claim_of(claims[at] - claims[at] % 4, there)
        if found then
          deeper[#deeper + 1] = found
        else
          less_deep[#less_deep + 1] = claims[at]
        end
      end
      if #less_deep == 0 then
        held, claims, run = block, deeper, there
      else
        if #deeper > 0 then
          narrow(block, absent, deeper, there)
        end
        absent, claims = block, less_deep
      end
    end
  end
  emit(held, claims, run)
end

-- From the deepest probe up: where an incarnation is met first is the last probe at which it is held.
local function find_depths()
  for number = #probes, 1, -1 do
    local run = runs[number]
    if run and run ~= runs[number + 1] then
      local claims = meet_in(run)
      if #claims > 0 then
        narrow(probes[number], probes[number + 1] or probes[number] + 1, claims, run)
      end
    end
  end
end

local function read_loads()
  for at = 1, #ARGV[3], 4 do
    want_load((read('>I4', ARGV[3], at)))
  end
  local keys, loads, num_loads = {}, {}, 0
  for at = 1, #wanted do
    keys[at] = format('%s:l:%d', BASE, wanted[at])
  end
  local values = keys[1] and call('MGET', unpack(keys)) or {}
  for at = 1, #wanted do
    if values[at] then
      loads[num_loads + 1], loads[num_loads + 2] = wanted[at], values[at]
      num_loads = num_loads + 2
    end
  end
  return loads
end

-- Incarnations with an entry that has not expired and a live lease, u32 big-endian each.
local function live_pending(entries)
  local owners, new, pending = {}, {}, ''
  for at = 1, #entries, PENDING_BYTES do
    local incarnation, ends = read('>I4I8', entries, at)
    if ends > now then
      owners[#owners + 1] = incarnation * 4
      if live_by_owner[incarnation * 4] == nil then
        new[#new + 1] = incarnation * 4
      end
    end
  end
  if #new > 0 then
    meet(new)
  end
  for at = 1, #owners do
    if live_by_owner[owners[at]] then
      pending = pending .. struct.pack('>I4', owners[at] / 4)
    end
  end
  return pending
end

local function read_pending()
  local keys, pending, num_pending = {}, {}, 0
  for at = 1, #boundaries, 16 do
    keys[#keys + 1] = BASE .. ':p:' .. sub(boundaries, at, at + 15)
  end
  local values = keys[1] and call('MGET', unpack(keys)) or {}
  local before, found -- who asks for equal prompts leaves equal entries on all boundaries
  for place = 1, #keys do
    local entries = values[place]
    if entries then
      if entries ~= before then
        before, found = entries, live_pending(entries)
      end
      if found ~= '' then
        pending[num_pending + 1], pending[num_pending + 2] = place, found
        num_pending = num_pending + 2
      end
    end
  end
  return pending
end

walk()
find_depths()
return {now, groups, read_loads(), read_pending()}
