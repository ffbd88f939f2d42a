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

local num_claims = 0

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
  local place, found = find(run, claim)
  if not found then
    num_claims = num_claims + 1
    write_run(hashes, at, sub(run, 1, place - 1) .. packed .. sub(run, place), is_long, key, field)
  end
end

local function remove(hashes, at)
  local run, is_long, key, field = read_block(hashes, at)
  if not run then
    return
  end
  local place, found = find(run, claim)
  if found then
    num_claims = num_claims - 1
    write_run(hashes, at, sub(run, 1, place - 1) .. sub(run, place + 4), is_long, key, field)
  end
end

call('HSET', BATCHES, incarnation, ARGV[3])
for at = 1, #ARGV[4], 8 do
  add(ARGV[4], at)
end
for at = 1, #ARGV[5], 8 do
  remove(ARGV[5], at)
end
count_claims(incarnation, num_claims)
count_and_grow(most_fields)
return {'ok', index_id}
