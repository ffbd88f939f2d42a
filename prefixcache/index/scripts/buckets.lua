-- Where an index block stands and how its claims are read; index/keys.py draws it. Numbers are compared, never
-- strings: Lua orders strings by the server's locale. Hashes lie packed side by side, 8 bytes each; `at` is the byte at
-- which one begins, and its head the number that its first four bytes make.
local LONG_MARKER = '\255\255\255\255'
local shape = redis.call('HMGET', META, 'k', 'split')
local bits, split = tonumber(shape[1]) or FIRST_BITS, tonumber(shape[2]) or 0
local WHOLE, DIVIDED = BASE .. ':b:' .. bits .. ':', BASE .. ':b:' .. bits + 1 .. ':'
-- Heads that one bucket covers, before and after it is divided.
local WHOLE_WIDTH, DIVIDED_WIDTH = 2 ^ (32 - bits), 2 ^ (31 - bits)
local call, sub, read = redis.call, string.sub, struct.unpack

local function bucket_of(head)
  if head < split * WHOLE_WIDTH then
    return DIVIDED .. (head - head % DIVIDED_WIDTH) / DIVIDED_WIDTH
  end
  return WHOLE .. (head - head % WHOLE_WIDTH) / WHOLE_WIDTH
end

local function long_key(hash)
  return BASE .. ':h:' .. string.format('%08x%08x', read('>I4I4', hash))
end

-- The block's sorted run of claims, false if it has no field; whether the run stands in a key of its own; key and name
-- of the field.
local function read_block(hashes, at)
  local key, field = bucket_of((read('>I4', hashes, at))), sub(hashes, at + 1, at + 7)
  local run = call('HGET', key, field)
  if run == LONG_MARKER then
    return call('GET', long_key(sub(hashes, at, at + 7))) or '', true, key, field
  end
  return run, false, key, field
end

-- struct's name for `number` claims in a row, made once.
local formats = {}
local function claims_format(number)
  local format = formats[number]
  if not format then
    format = '>' .. string.rep('I4', number)
    formats[number] = format
  end
  return format
end

-- The claims of a run as numbers; unpacked in pieces, which the Lua stack bounds.
local MOST_UNPACKED = 128
local function claims_of(run)
  local number = #run / 4
  if number <= MOST_UNPACKED then
    local claims = {read(claims_format(number), run)}
    claims[number + 1] = nil -- where unpack stopped
    return claims
  end
  local claims = {}
  for first = 1, number, MOST_UNPACKED do
    local some = math.min(MOST_UNPACKED, number - first + 1)
    local piece = {read(claims_format(some), run, first * 4 - 3)}
    for at = 1, some do
      claims[first + at - 1] = piece[at]
    end
  end
  return claims
end

local function run_of(claims)
  local number = #claims
  if number <= MOST_UNPACKED then
    return struct.pack(claims_format(number), unpack(claims))
  end
  local pieces = {}
  for first = 1, number, MOST_UNPACKED do
    local last = math.min(first + MOST_UNPACKED - 1, number)
    pieces[#pieces + 1] = struct.pack(claims_format(last - first + 1), unpack(claims, first, last))
  end
  return table.concat(pieces)
end
