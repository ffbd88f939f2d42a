-- apply: writes one numbered batch of claims of an incarnation and divides buckets that became too full.
-- KEYS[1]  meta
-- ARGV[1]  incarnation
-- ARGV[2]  index_id it was registered in, '' if not known
-- ARGV[3]  number of the batch
-- ARGV[4]  hashes of index blocks now held, 8 bytes each
-- ARGV[5]  hashes of index blocks no longer held; one that stands in both is removed
-- ARGV[6]  fields per bucket above which buckets are divided
-- Returns  {status, index_id}; status ok, old, gap or dead as index/base.py says; index_id '' in an empty store
-- Cost     about 2 us a new hash, 4 us one that others hold; 40 us a division, of which a full batch causes five or six
--          while the index grows
-- Race     one writer per incarnation and batch numbers without holes: a resend changes nothing, and a batch that
--          overtakes another is refused, so that a late add never brings back a removed claim. Claims, counts and the
--          shape of the buckets change together: no reader looks into two buckets for one block.
--          A server without memory refuses the first write, and then nothing is written.
local MOST_DIVISIONS, MOST_ARGUMENTS = 8, 1000
local incarnation, batch, most_fields = ARGV[1], tonumber(ARGV[3]), tonumber(ARGV[6])
local claim = incarnation * 4
local packed = struct.pack('>I4', claim)
local index_id = call('HGET', META, 'index_id') or ''

if not may_write(incarnation, ARGV[2]) then
  return {'dead', index_id}
end
local last = tonumber(call('HGET', BATCHES, incarnation) or 0)
if batch <= last then
  return {'old', index_id}
elseif batch > last + 1 then
  return {'gap', index_id}
end

-- Byte at which our claim stands or belongs in a sorted run, and whether it stands there.
local function find(run)
  local low, high = 0, #run / 4
  if high == 0 or read('>I4', run, high * 4 - 3) < claim then
    return #run + 1, false
  end
  while low < high do
    local middle = math.floor((low + high) / 2)
    local there = read('>I4', run, middle * 4 + 1)
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

local num_claims, num_fields = 0, 0

-- A block is either tried as a new one or read first: batches follow chains, on which new ones lie side by side.
local is_new = true
local function add(hashes, at)
  if is_new and call('HSETNX', bucket_of((read('>I4', hashes, at))), sub(hashes, at + 1, at + 7), packed) == 1 then
    num_claims, num_fields = num_claims + 1, num_fields + 1
    return
  end
  local run, is_long, key, field = read_block(hashes, at)
  is_new = not run
  if is_new then
    call('HSET', key, field, packed)
    num_claims, num_fields = num_claims + 1, num_fields + 1
    return
  end
  local place, found = find(run)
  if found then
    return
  end
  num_claims = num_claims + 1
  run = sub(run, 1, place - 1) .. packed .. sub(run, place)
  if is_long or #run > INLINE_CLAIMS * 4 then
    call('SET', long_key(sub(hashes, at, at + 7)), run)
    run = LONG_MARKER
  end
  if not is_long then
    call('HSET', key, field, run)
  end
end

local function remove(hashes, at)
  local run, is_long, key, field = read_block(hashes, at)
  if not run then
    return
  end
  local place, found = find(run)
  if not found then
    return
  end
  num_claims = num_claims - 1
  run = sub(run, 1, place - 1) .. sub(run, place + 4)
  if is_long and #run >= LONG_CLAIMS * 4 then
    call('SET', long_key(sub(hashes, at, at + 7)), run)
    return
  elseif is_long then
    call('DEL', long_key(sub(hashes, at, at + 7)))
  end
  if #run > 0 then
    call('HSET', key, field, run)
  else
    call('HDEL', key, field)
    num_fields = num_fields - 1
  end
end

call('HSET', BATCHES, incarnation, ARGV[3])
for at = 1, #ARGV[4], 8 do
  add(ARGV[4], at)
end
for at = 1, #ARGV[5], 8 do
  remove(ARGV[5], at)
end
if num_claims ~= 0 and call('HINCRBY', CLAIMS_HELD, incarnation, num_claims) == 0 then
  call('HDEL', CLAIMS_HELD, incarnation)
end
local fields = call('HINCRBY', META, 'fields', num_fields)

local function write_bucket(key, content)
  for first = 1, #content, MOST_ARGUMENTS do
    call('HSET', key, unpack(content, first, math.min(first + MOST_ARGUMENTS - 1, #content)))
  end
end

-- Bucket `split` of 2^bits becomes buckets 2 split and 2 split + 1 of 2^(bits + 1): the next bit of the hash, which
-- stands in the fields, decides.
local function divide()
  local old = BASE .. ':b:' .. bits .. ':' .. split
  local new = BASE .. ':b:' .. bits + 1 .. ':'
  local content = call('HGETALL', old)
  local byte, half = math.floor(bits / 8), 2 ^ (7 - bits % 8)
  local lower, upper = {}, {}
  for at = 1, #content, 2 do
    local into = string.byte(content[at], byte) % (2 * half) < half and lower or upper
    local last_written = #into
    into[last_written + 1], into[last_written + 2] = content[at], content[at + 1]
  end
  write_bucket(new .. split * 2, lower)
  write_bucket(new .. split * 2 + 1, upper)
  call('DEL', old)
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
  call('HSET', META, 'k', bits, 'split', split)
end
return {'ok', index_id}
