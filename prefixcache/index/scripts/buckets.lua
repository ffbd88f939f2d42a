-- Where an index block stands and how its claims are read; index/keys.py draws it. Numbers are compared, never
-- strings: Lua orders strings by the server's locale.
local LONG_MARKER = '\255\255\255\255'
local shape = redis.call('HMGET', META, 'k', 'split')
local bits, split = tonumber(shape[1]) or FIRST_BITS, tonumber(shape[2]) or 0

local function bucket_key(key_bits, number)
  return BASE .. ':b:' .. key_bits .. ':' .. number
end

local function bucket_of(hash)
  local head = struct.unpack('>I4', hash)
  local number = math.floor(head / 2 ^ (32 - bits))
  if number < split then
    return bucket_key(bits + 1, math.floor(head / 2 ^ (31 - bits)))
  end
  return bucket_key(bits, number)
end

local function long_key(hash)
  return BASE .. ':h:' .. string.format('%08x%08x', struct.unpack('>I4I4', hash))
end

-- The block's sorted run of claims, false if it has no field; and whether the run stands in a key of its own.
local function read_block(hash)
  local run = redis.call('HGET', bucket_of(hash), string.sub(hash, 2))
  if run == LONG_MARKER then
    return redis.call('GET', long_key(hash)) or '', true
  end
  return run, false
end
