-- sweep: one step of the elected keeper: ends incarnations that are dead, then removes claims of those that are gone.
-- KEYS[1]  meta
-- ARGV[1]  id of the caller
-- ARGV[2]  length of its office in ms, which each call renews
-- ARGV[3]  ms after which a lease that ended is dead
-- ARGV[4]  fields to look at
-- Returns  {status, incarnations ended, claims removed}; status other, idle or more as index/base.py says
-- Cost     about 0.7 us a field and 10 us a long run that it looks at; where nobody is dead one read of all counts
-- Race     one keeper at a time: whoever finds the office taken does nothing.
--          Lease, batch number and load of a dead incarnation go in one script: a renewal either comes before it, and
--          the lease has not ended, or after it and finds none. Only time that a keeper has watched counts, so that a
--          store that stood still, or was loaded from disk, kills nobody: all leases ended, but nobody could renew.
--          The walk goes by hash, not by bucket: a division between two calls neither hides a block nor shows it twice.
--          The first write removes something: a server without memory refuses no more than that.
local KEEPER, LAST_HEAD = BASE .. ':keeper', 2 ^ 32 - 1
local MOST_DEAD, MOST_ARGUMENTS = 256, 1000
local EMPTY_BUCKET_COST, LONG_RUN_COST, CLAIMS_A_FIELD = 2, 12, 4 -- in fields
local keeper, office_ms, dead_ms, most_looked = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local office = call('GET', KEEPER)
if office and office ~= keeper then
  return {'other', 0, 0}
end

local now = now_ms()
local watch = call('HMGET', META, 'swept_at', 'watched_since', 'cursor', 'dying')
local function noted(at)
  return tonumber(string.match(watch[at] or '', '^%d+$'))
end
local swept_at, watched_since, cursor = noted(1), noted(2), noted(3) or 0
if not swept_at or not watched_since or swept_at > now or watched_since > now or now - swept_at > office_ms then
  watched_since = now
end
local ended = {}
if now - watched_since >= dead_ms then
  ended = call('ZRANGEBYSCORE', LIVE, '-inf', string.format('(%.0f', now - dead_ms), 'LIMIT', 0, MOST_DEAD)
end

-- Claims held by those that have no lease entry, or just lost it. What names no incarnation has none and goes at once.
local held_by_dead, num_dead = {}, 0
local function add_dead(name, held)
  local incarnation = tonumber(name)
  local is_one = string.match(name, '^[1-9]%d*$') and incarnation < 2 ^ INCARNATION_BITS
  held_by_dead[is_one and incarnation or name] = is_one and tonumber(held) or 0
  num_dead = num_dead + 1
end

local function find_dead()
  local is_ended = {}
  for at = 1, #ended do
    is_ended[ended[at]] = true
  end
  local counts = call('HGETALL', CLAIMS_HELD)
  for first = 1, #counts, MOST_ARGUMENTS do
    local names = {}
    for at = first, math.min(first + MOST_ARGUMENTS, #counts + 1) - 1, 2 do
      names[#names + 1] = counts[at]
    end
    local leases = call('ZMSCORE', LIVE, unpack(names))
    for at = 1, #names do
      if not leases[at] or is_ended[names[at]] then
        add_dead(names[at], counts[first + at * 2 - 1])
      end
    end
  end
end

-- What is left of a run, the run itself if nothing goes, and the dead incarnations in it; equal runs are read once.
local verdicts = {}
local function judge(run)
  local verdict = verdicts[run]
  if not verdict then
    local claims, left, gone = claims_of(run), {}, {}
    for at = 1, #claims do
      local incarnation = (claims[at] - claims[at] % 4) / 4
      if held_by_dead[incarnation] then
        gone[#gone + 1] = incarnation
      else
        left[#left + 1] = claims[at]
      end
    end
    verdict = {left = #gone == 0 and run or #left > 0 and run_of(left) or '', gone = gone, times = 0}
    verdicts[run] = verdict
  end
  return verdict
end

local num_looked, num_fields, num_claims = 0, 0, 0

-- Sweeps the long runs of a bucket from head `from` on, in the order of their heads; returns the head at which it
-- stopped, if it did. Those that become short move back into the bucket: `changes` gets what stands in a field, '' for
-- nothing.
local function sweep_long_runs(fields, from, changes)
  table.sort(fields, function(one, other) return one.head < other.head end)
  local before
  for _, block in ipairs(fields) do
    if block.head >= from then
      if before and block.head ~= before and num_looked >= most_looked then -- never before the first one
        return block.head
      end
      before = block.head
      local key = long_key(block.hash)
      local run = call('GET', key) or ''
      num_looked = num_looked + LONG_RUN_COST + #run / 4 / CLAIMS_A_FIELD
      local verdict = judge(run)
      if verdict.left ~= run then
        verdict.times = verdict.times + 1
        if #verdict.left >= LONG_CLAIMS * 4 then
          call('SET', key, verdict.left)
        else
          call('DEL', key)
          changes[block.field] = verdict.left
        end
      end
    end
  end
end

local function write_fields(key, names, content)
  local words = {}
  for at = 1, #names do
    words[#words + 1], words[#words + 2] = names[at], content[names[at]]
  end
  for first = 1, #words, MOST_ARGUMENTS do
    call('HSET', key, unpack(words, first, math.min(first + MOST_ARGUMENTS - 1, #words)))
  end
end

-- Writes a bucket: fields that become '' go. Many go faster by writing the rest anew.
local function write_bucket(key, content, changes)
  local gone, changed, rest, runs = {}, {}, {}, {}
  for at = 1, #content, 2 do
    local field = content[at]
    runs[field] = changes[field] or content[at + 1]
    if runs[field] == '' then
      gone[#gone + 1] = field
    else
      rest[#rest + 1] = field
      if changes[field] then
        changed[#changed + 1] = field
      end
    end
  end
  num_fields = num_fields - #gone
  if #gone > #rest then
    call('DEL', key)
    write_fields(key, rest, runs)
    return
  end
  for first = 1, #gone, MOST_ARGUMENTS do
    call('HDEL', key, unpack(gone, first, math.min(first + MOST_ARGUMENTS - 1, #gone)))
  end
  write_fields(key, changed, runs)
end

-- Sweeps the bucket in which `cursor` lies and moves it behind, or to the long run at which it must stop.
local function sweep_bucket()
  local width = cursor < split * WHOLE_WIDTH and DIVIDED_WIDTH or WHOLE_WIDTH
  local first_head = cursor - cursor % width
  local first_byte = string.char(math.floor(first_head / 2 ^ 24))
  local key = bucket_of(cursor)
  local content, changes, long = call('HGETALL', key), {}, {}
  num_looked = num_looked + #content / 2 + EMPTY_BUCKET_COST
  for at = 1, #content, 2 do
    local field, run = content[at], content[at + 1]
    if run == LONG_MARKER then
      local hash = first_byte .. field
      long[#long + 1] = {head = (read('>I4', hash)), hash = hash, field = field}
    else
      local verdict = judge(run)
      if verdict.left ~= run then
        verdict.times = verdict.times + 1
        changes[field] = verdict.left
      end
    end
  end
  local stopped_at = sweep_long_runs(long, cursor, changes)
  if next(changes) then
    write_bucket(key, content, changes)
  end
  cursor = stopped_at or first_head + width
end

local function write_counts()
  for _, verdict in pairs(verdicts) do
    for _, incarnation in ipairs(verdict.gone) do
      held_by_dead[incarnation] = held_by_dead[incarnation] - verdict.times
      num_claims = num_claims + verdict.times
    end
  end
  -- Who was dead for a whole round has no claim left, whatever is counted: a server that evicts keys lost some.
  local is_over = {}
  if cursor > LAST_HEAD then
    for at = 1, #(watch[4] or '') - 3, 4 do
      is_over[read('>I4', watch[4], at)] = true
    end
  end
  local dying = {}
  for incarnation, held in pairs(held_by_dead) do
    if held <= 0 or is_over[incarnation] then
      call('HDEL', CLAIMS_HELD, incarnation)
      num_dead = num_dead - 1
    else
      call('HSET', CLAIMS_HELD, incarnation, held)
      dying[#dying + 1] = struct.pack('>I4', incarnation)
    end
  end
  if num_fields ~= 0 then
    call('HINCRBY', META, 'fields', num_fields)
  end
  if cursor > LAST_HEAD then
    cursor = 0
    call('HSET', META, 'dying', table.concat(dying))
  end
end

find_dead()
call('DEL', KEEPER)
call('SET', KEEPER, keeper, 'PX', office_ms)
for at = 1, #ended do
  end_incarnation(ended[at])
end
if ended[1] then
  forget_families()
end
if num_dead > 0 then
  while num_looked < most_looked and cursor <= LAST_HEAD do
    sweep_bucket()
  end
  write_counts()
end
call('HSET', META, 'swept_at', now, 'watched_since', watched_since, 'cursor', cursor)
return {num_dead > 0 and 'more' or 'idle', #ended, num_claims}
