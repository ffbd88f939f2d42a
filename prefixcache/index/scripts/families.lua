-- families: reads the families of plain engines and extends the leases of those that answer.
-- KEYS[1]  meta
-- ARGV[1]  length of a lease in ms
-- ARGV[2]  number n of engines whose families are renewed: the first ones
-- ARGV[3 ..]  engines
-- Returns  {family, ..} in the order of the engines: {claims, anchor, generations, ..} as open_family, nil for none
-- Cost     about 10 us an engine
-- Race     a renewal that meets a removal (or an emptied store) cannot write a lease anew.
local MOST_WORDS = 4000
local now, answer = now_ms(), {}
for first = 3, #ARGV, MOST_WORDS do
  local entries = redis.call('HMGET', FAMILIES, unpack(ARGV, first, math.min(first + MOST_WORDS - 1, #ARGV)))
  for at = 1, #entries do
    local ids, place = standing_ids(entries[at]), first + at - 3
    if ids and place <= tonumber(ARGV[2]) then
      renew_family(ids, now, ARGV[1])
    end
    answer[place] = ids and family_answer(ids) or false
  end
end
return answer
