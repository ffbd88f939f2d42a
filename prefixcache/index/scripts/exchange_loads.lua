-- exchange_loads: writes what a proxy has put on each incarnation, and reads the load of all it may choose from.
-- KEYS[1]  meta
-- ARGV[1]  writer: id of the proxy process, 8 bytes
-- ARGV[2]  number n of its records
-- ARGV[3 .. 3n + 2]  incarnation, version, payload of each
-- ARGV[3n + 3]  incarnations whose load is read, u32 big-endian each
-- Returns  {now_ms, {id, value, ..}}, values as prefixcache/load.py draws them; who has no load is absent
-- Cost     about 5 us a record written, 1.5 a load read
-- Race     a record that was delayed behind a newer one, in a commit or a call as this, is not written; nor is one of
--          an incarnation that was retired or removed meanwhile.
local MOST_WORDS = 4000
local writer, num_records = ARGV[1], tonumber(ARGV[2])
local asked = ARGV[3 * num_records + 3]
local now = now_ms()

-- The replies of a command that takes any number of words.
local function replies_of(command, words)
  local replies = {}
  for first = 1, #words, MOST_WORDS do
    local line = {unpack(command)}
    for at = first, math.min(first + MOST_WORDS - 1, #words) do
      line[#line + 1] = words[at]
    end
    local some = redis.call(unpack(line))
    for at = 1, #some do
      replies[first + at - 1] = some[at]
    end
  end
  return replies
end

local function keys_of(incarnations)
  local keys = {}
  for at = 1, #incarnations do
    keys[at] = load_key(incarnations[at])
  end
  return keys
end

local written, asked_for, answer = {}, {}, {}
for at = 3, 3 * num_records, 3 do
  written[#written + 1] = ARGV[at]
end
local keys, leases = keys_of(written), replies_of({'ZMSCORE', LIVE}, written)
local values = replies_of({'MGET'}, keys)
for at = 1, #keys do
  values[at] = leases[at] and load_with(values[at], writer, ARGV[3 * at + 1], ARGV[3 * at + 2], now)
end
for at = 1, #keys do
  if values[at] then
    write_load(keys[at], values[at])
  end
end

for at = 1, #asked, 4 do
  asked_for[#asked_for + 1] = struct.unpack('>I4', asked, at)
end
values = replies_of({'MGET'}, keys_of(asked_for))
for at = 1, #values do
  if values[at] then
    answer[#answer + 1], answer[#answer + 2] = asked_for[at], values[at]
  end
end
return {now, answer}
