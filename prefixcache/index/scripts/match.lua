-- match: the deepest live claim of each incarnation on a chain of index blocks.
-- KEYS[1]  meta
-- ARGV[1]  hashes of the chain, root side first, 8 bytes each
-- Returns  {depth, claims, depth, claims, ...}: claims is a run of u32 big-endian `incarnation << 2 | tier`, each
--          incarnation in one run only; depth counts from 1. Groups, because 256 holders of a system prompt are then
--          one string.
-- Cost     one HGET a block (and one GET a long run), one ZMSCORE; reads only
-- Race     one script sees claims, leases and the shape of the buckets of one moment.
local MOST_ARGUMENTS = 4000
local chain = ARGV[1]
local incarnations, runs, depths = {}, {}, {}
local seen = {}
local previous

-- From the deepest block up: where an incarnation is met first is its depth.
for depth = #chain / 8, 1, -1 do
  local run = read_block(string.sub(chain, depth * 8 - 7, depth * 8))
  if run and run ~= previous then
    previous = run
    for at = 1, #run, 4 do
      local claim = struct.unpack('>I4', run, at)
      local id = math.floor(claim / 4)
      if not seen[id] then
        seen[id] = true
        incarnations[#incarnations + 1] = id
        runs[#runs + 1] = string.sub(run, at, at + 3)
        depths[#depths + 1] = depth
      end
    end
  end
end

local answer = {}
local now = now_ms()
for first = 1, #incarnations, MOST_ARGUMENTS do
  local last = math.min(first + MOST_ARGUMENTS - 1, #incarnations)
  local leases = redis.call('ZMSCORE', LIVE, unpack(incarnations, first, last))
  local group, group_depth = {}, depths[first]
  for at = first, last do
    if depths[at] ~= group_depth then
      if #group > 0 then
        answer[#answer + 1] = group_depth
        answer[#answer + 1] = table.concat(group)
      end
      group, group_depth = {}, depths[at]
    end
    local lease = leases[at - first + 1]
    if lease and tonumber(lease) > now then
      group[#group + 1] = runs[at]
    end
  end
  if #group > 0 then
    answer[#answer + 1] = group_depth
    answer[#answer + 1] = table.concat(group)
  end
end
return answer
