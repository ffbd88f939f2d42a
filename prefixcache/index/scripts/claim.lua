-- claim: moves blocks of a plain engine into its newest generation; opens the next one and retires old ones.
-- KEYS[1]  meta
-- ARGV[1]  engine
-- ARGV[2]  anchor of its family
-- ARGV[3]  hashes of index blocks, 8 bytes each
-- ARGV[4]  index blocks that its cache holds
-- ARGV[5]  length of a lease in ms
-- ARGV[6]  fields per bucket above which buckets are divided
-- Returns  {claims, anchor, generations, ..} as open_family, false if the standing family has another anchor
-- Cost     about 2 us a new block, 4 us one that an older generation, or others, hold; 40 us a division
-- Race     any number of proxies claim at once: blocks are only added, and each stands on one generation, so that the
--          order of the calls decides nothing but how young a block is. Claims, counts, generations and the shape of
--          the buckets change together. Who does not know yet that the engine began anew names another anchor.
local engine, capacity, lease_ms, now = ARGV[1], tonumber(ARGV[4]), ARGV[5], now_ms()
local entry = call('HGET', FAMILIES, engine)
local ids = standing_ids(entry)
if not ids or ids[1] ~= tonumber(ARGV[2]) then
  return false
end
if not add_generations(ids, now, lease_ms) then
  return redis.error_reply(NO_IDS)
end
local held = claims_held(ids)
if held[3] * GENERATIONS_A_CACHE >= capacity and #ids < 2 + MOST_GENERATIONS then
  local id = give_id(0, now, lease_ms)
  if not id then
    return redis.error_reply(NO_IDS)
  end
  table.insert(ids, 2, id)
  table.insert(held, 2, 0)
end

local NEWEST = 3
local place_by_owner = {}
for at = NEWEST, #ids do
  place_by_owner[ids[at] * 4] = at
end
local packed = struct.pack('>I4', ids[NEWEST] * 4)
local change = {}
for at = 1, #ids do
  change[at] = 0
end

-- What becomes of a run: itself with our newest claim in place of an older one, and the place of that one's generation.
-- Blocks of one prompt mostly have equal runs.
local outcomes = {}
local function outcome_of(run)
  local outcome = outcomes[run]
  if outcome then
    return outcome
  end
  outcome = {run = run}
  local claims = claims_of(run)
  for at = 1, #claims do
    outcome.from = outcome.from or place_by_owner[claims[at] - claims[at] % 4]
    if outcome.from then
      outcome.run = sub(run, 1, at * 4 - 4) .. sub(run, at * 4 + 1)
      break
    end
  end
  if outcome.from == NEWEST then
    outcome.run = run
  else
    local place = find(outcome.run, ids[NEWEST] * 4)
    outcome.run = sub(outcome.run, 1, place - 1) .. packed .. sub(outcome.run, place)
  end
  outcomes[run] = outcome
  return outcome
end

local function claim(hashes, at)
  local run, is_long, key, field = read_block(hashes, at)
  if not run then
    call('HSET', key, field, packed)
    change[NEWEST], num_fields = change[NEWEST] + 1, num_fields + 1
    return
  end
  local outcome = outcome_of(run)
  if outcome.from ~= NEWEST then
    change[NEWEST] = change[NEWEST] + 1
    if outcome.from then
      change[outcome.from] = change[outcome.from] - 1
    end
    write_run(hashes, at, outcome.run, is_long, key, field)
  end
end

for at = 1, #ARGV[3], 8 do
  claim(ARGV[3], at)
end
local num_claims = 0
for at = 1, #ids do
  count_claims(ids[at], change[at])
  held[at] = held[at] + change[at]
  num_claims = num_claims + held[at]
end

-- Old generations go from the last one on while the others hold enough, and wherever nothing is left of one.
local kept, is_last = {}, true
for at = #ids, 1, -1 do
  is_last = is_last and at > NEWEST and num_claims - held[at] >= capacity
  if at > NEWEST and (is_last or held[at] == 0) then
    num_claims = num_claims - held[at]
    end_incarnation(ids[at])
  else
    table.insert(kept, 1, ids[at])
  end
end
write_family(engine, kept)
count_and_grow(tonumber(ARGV[6]))
return family_answer(kept)
