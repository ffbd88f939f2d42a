"""Lets time pass on a server: every moment that is stored under a namespace moves into the past."""

from __future__ import annotations

from prefixcache.index.keys import NamespaceKeys
from tests.support.valkey import Server

_SHIFT = """
local base, by = KEYS[1], tonumber(ARGV[1])
local function text(ms) return string.format('%.0f', ms) end
local leases = redis.call('ZRANGE', base .. ':live', 0, -1, 'WITHSCORES')
for at = 1, #leases, 2 do
  redis.call('ZADD', base .. ':live', text(leases[at + 1] - by), leases[at])
end
for _, field in ipairs({'swept_at', 'watched_since'}) do
  local moment = redis.call('HGET', base .. ':meta', field)
  if moment then redis.call('HSET', base .. ':meta', field, text(moment - by)) end
end
local function age(key)
  local left = redis.call('PTTL', key)
  if left <= by then redis.call('DEL', key) else redis.call('PEXPIRE', key, text(left - by)) end
end
for _, key in ipairs(redis.call('KEYS', '*')) do
  local kind = string.sub(key, 1, #base) == base and string.match(string.sub(key, #base + 1), '^:(%a+)')
  if kind == 'keeper' then
    age(key)
  elseif kind == 'p' then
    local moved = string.gsub(redis.call('GET', key), string.rep('.', 24), function(entry)
      local incarnation, end_ms, request = struct.unpack('>I4I8c12', entry)
      return struct.pack('>I4I8c12', incarnation, math.max(end_ms - by, 0), request)
    end)
    redis.call('SET', key, moved, 'KEEPTTL')
    age(key)
  elseif kind == 'l' then
    local value, moved, at = redis.call('GET', key), '', 1
    while at <= #value do
      local writer, length, format, end_ms, version = struct.unpack('>c8BBI8I8', value, at)
      local head = struct.pack('>c8BBI8I8', writer, length, format, math.max(end_ms - by, 0), version)
      moved = moved .. head .. string.sub(value, at + #head, at + 8 + length)
      at = at + 9 + length
    end
    redis.call('SET', key, moved, 'KEEPTTL')
    age(key)
  end
end
"""


def let_pass(server: Server, keys: NamespaceKeys, passed_s: float) -> None:
    server.command("EVAL", _SHIFT, 1, keys.base, round(passed_s * 1_000))
