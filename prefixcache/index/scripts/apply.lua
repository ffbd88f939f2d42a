-- apply: writes one numbered batch of claims of an incarnation and divides buckets that became too full.
-- KEYS[1]  meta
-- ARGV[1]  incarnation
-- ARGV[2]  index_id it was registered in, '' if not known
-- ARGV[3]  number of the batch
-- ARGV[4]  hashes of index blocks now held, 8 bytes each
-- ARGV[5]  hashes of index blocks no longer held; one that stands in both is removed
-- ARGV[6]  fields per bucket above which buckets are divided
-- Returns  {status, index_id}; status ok, old, gap or dead as index/base.py says; index_id '' in an empty store
-- Cost     about 3 us a hash; at most 32 divisions of one bucket each
-- Race     one writer per incarnation and batch numbers without holes: a resend changes nothing, and a batch that
--          overtakes another is refused, so that a late add never brings back a removed claim. Claims, counts and the
--          shape of the buckets change together: no reader looks into two buckets for one block.
--          Blocks are read before the first write, so that a script that is killed while it reads, or refused for lack
--          of memory, has written nothing.
local MOST_DIVISIONS, MOST_ARGUMENTS = 32, 1000
local incarnation, batch, most_fields = ARGV[1], tonumber(ARGV[3]), tonumber(ARGV[6])
local claim = incarnation * 4
local packed = struct.pack('>I4', claim)
local index_id = redis.call('HGET', META, 'index_id') or ''

if not may_write(incarnation, ARGV[2]) then
  return {'dead', index_id}
end
local last = tonumber(redis.call('HGET', BATCHES, incarnation) or 0)
if batch <= last then
  return {'old', index_id}
elseif batch > last + 1 then
  return {'gap', index_id}
end

local blocks, order = {}, {}

local function block_at(hash)
  local block = blocks[hash]
  if not block then
    local run, long = read_block(hash)
    block = {hash = hash, before = run, run = run or '', long = long}
    blocks[hash] = block
    order[#order + 1] = block
  end
  return block
end

-- Byte at which our claim stands or belongs in a sorted run, and whether it stands there.
local function find(run)
  local low, high = 0, #run / 4
  while low < high do
    local middle = math.floor((low + high) / 2)
    local there = struct.unpack('>I4', run, middle * 4 + 1)
    if there == claim then
      return middle * 4 + 1, true
    elseif there < claim then
      low = middle + 1
    else
      high = middle
    end
  end
  return low * 4 + 1, false
end

local num_claims = 0
for at = 1, #ARGV[4], 8 do
  local block = block_at(string.sub(ARGV[4], at, at + 7))
  local place, found = find(block.run)
  if not found then
    block.run = string.sub(block.run, 1, place - 1) .. packed .. string.sub(block.run, place)
    num_claims = num_claims + 1
  end
end
for at = 1, #ARGV[5], 8 do
  local block = block_at(string.sub(ARGV[5], at, at + 7))
  local place, found = find(block.run)
  if found then
    block.run = string.sub(block.run, 1, place - 1) .. string.sub(block.run, place + 4)
    num_claims = num_claims - 1
  end
end

redis.call('HSET', BATCHES, incarnation, ARGV[3])
local num_fields = 0
for _, block in ipairs(order) do
  if block.run ~= (block.before or '') then
    local key, field, held = bucket_of(block.hash), string.sub(block.hash, 2), #block.run / 4
    local long = held > INLINE_CLAIMS or (block.long and held >= LONG_CLAIMS)
    if long then
      redis.call('SET', long_key(block.hash), block.run)
    elseif block.long then
      redis.call('DEL', long_key(block.hash))
    end
    if held == 0 then
      redis.call('HDEL', key, field)
      num_fields = num_fields - 1
    elseif not (long and block.long) then
      redis.call('HSET', key, field, long and LONG_MARKER or block.run)
      if not block.before then
        num_fields = num_fields + 1
      end
    end
  end
end
if num_claims ~= 0 and redis.call('HINCRBY', CLAIMS_HELD, incarnation, num_claims) == 0 then
  redis.call('HDEL', CLAIMS_HELD, incarnation)
end
local fields = redis.call('HINCRBY', META, 'fields', num_fields)

local function write_bucket(key, content)
  for first = 1, #content, MOST_ARGUMENTS do
    redis.call('HSET', key, unpack(content, first, math.min(first + MOST_ARGUMENTS - 1, #content)))
  end
end

-- Bucket `split` of 2^bits becomes buckets 2 split and 2 split + 1 of 2^(bits + 1).
local function divide()
  local old = bucket_key(bits, split)
  local first_byte = string.char(math.floor(split / 2 ^ (bits - 8)))
  local content = redis.call('HGETALL', old)
  local lower, upper = {}, {}
  for at = 1, #content, 2 do
    local head = struct.unpack('>I4', first_byte .. string.sub(content[at], 1, 3))
    local half = math.floor(head / 2 ^ (31 - bits)) == split * 2 and lower or upper
    half[#half + 1] = content[at]
    half[#half + 1] = content[at + 1]
  end
  write_bucket(bucket_key(bits + 1, split * 2), lower)
  write_bucket(bucket_key(bits + 1, split * 2 + 1), upper)
  redis.call('DEL', old)
  split = split + 1
  if split == 2 ^ bits then
    bits, split = bits + 1, 0
  end
end

local divisions = 0
while divisions < MOST_DIVISIONS and fields > most_fields * (2 ^ bits + split) do
  divide()
  divisions = divisions + 1
end
if divisions > 0 then
  redis.call('HSET', META, 'k', bits, 'split', split)
end
return {'ok', index_id}
