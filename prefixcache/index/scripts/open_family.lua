-- open_family: the standing family of a plain engine, or a new one.
-- KEYS[1]  meta
-- ARGV[1]  engine
-- ARGV[2]  anchor of the family that is retired if it still stands, 0 for none
-- ARGV[3]  length of a lease in ms
-- Returns  {claims, anchor, generations, ..}: claims of all of them, ids from new to old
-- Cost     about 30 us
-- Race     of several proxies that see at once that an engine began, or began anew, the first one opens a family and all
--          others get that one: who names an anchor that another replaced already retires nothing.
local now, lease_ms = now_ms(), ARGV[3]
local ids = standing_ids(redis.call('HGET', FAMILIES, ARGV[1]))
if ids and ids[1] == tonumber(ARGV[2]) then
  for at = 1, #ids do
    end_incarnation(ids[at])
  end
  ids = nil
end
ids = ids or {give_id(tonumber(ARGV[2]), now, lease_ms) or nil}
if not ids[1] or not add_generations(ids, now, lease_ms) then
  return redis.error_reply(NO_IDS)
end
write_family(ARGV[1], ids)
renew_family(ids, now, lease_ms)
return family_answer(ids)
