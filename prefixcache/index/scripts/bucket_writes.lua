-- Writes of claims, and the growth that follows. Whoever writes adds up what changes and calls `count_and_grow` last.
local MOST_DIVISIONS, MOST_ARGUMENTS = 8, 1000
local num_fields = 0 -- added

-- Byte at which a claim stands or belongs in a sorted run, and whether it stands there.
local function find(run, claim)
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

-- Writes the changed run of a block that had one, wherever it belongs now; `is_long`, key and field as read_block said.
local function write_run(hashes, at, run, is_long, key, field)
  local stays_long = #run >= LONG_CLAIMS * 4 and (is_long or #run > INLINE_CLAIMS * 4)
  if stays_long then
    call('SET', long_key(sub(hashes, at, at + 7)), run)
  elseif is_long then
    call('DEL', long_key(sub(hashes, at, at + 7)))
  end
  if stays_long and is_long then
    return
  elseif #run > 0 then
    call('HSET', key, field, stays_long and LONG_MARKER or run)
  else
    call('HDEL', key, field)
    num_fields = num_fields - 1
  end
end

local function count_claims(incarnation, change)
  if change ~= 0 and call('HINCRBY', CLAIMS_HELD, incarnation, change) == 0 then
    call('HDEL', CLAIMS_HELD, incarnation)
  end
end

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

-- Counts the fields and divides buckets above `most_fields` a bucket.
local function count_and_grow(most_fields)
  local fields, divisions = call('HINCRBY', META, 'fields', num_fields), 0
  while divisions < MOST_DIVISIONS and fields > most_fields * (2 ^ bits + split) do
    divide()
    divisions = divisions + 1
  end
  if divisions > 0 then
    call('HSET', META, 'k', bits, 'split', split)
  end
end
