-- Load: P:{ns}:l:<incarnation> holds an entry of each writer; prefixcache/load.py draws one.
local ENTRY = '>c' .. WRITER_BYTES .. 'BBI8I8' -- up to the payload
local ENTRY_HEAD_BYTES = WRITER_BYTES + 1 + HEAD_BYTES
local WORKER_WRITER = string.rep('\0', WRITER_BYTES)

local function load_key(incarnation)
  return string.format('%s:l:%d', BASE, incarnation)
end

-- What becomes of the value of a load, false where there was none: the writer's new record comes to its end, those that
-- count for nothing go. False if the writer's own is no older: one that comes late never replaces a newer one.
local function load_with(value, writer, version, payload, now)
  local kept, from, at = '', 1, 1
  value, version = value or '', tonumber(version)
  while at + ENTRY_HEAD_BYTES - 1 <= #value do
    local its_writer, length, format, end_ms, its_version = struct.unpack(ENTRY, value, at)
    local after = at + WRITER_BYTES + 1 + length
    local counts = format == RECORD_FORMAT and end_ms > now and length >= HEAD_BYTES and after <= #value + 1
    if counts and its_writer == writer and its_version >= version then
      return false
    end
    if not counts or its_writer == writer then
      kept, from = kept .. string.sub(value, from, at - 1), after
    end
    at = after
  end
  return kept .. string.sub(value, from, at - 1)
    .. struct.pack(ENTRY, writer, HEAD_BYTES + #payload, RECORD_FORMAT, now + LOAD_RECORD_MS, version) .. payload
end

local function write_load(key, value)
  redis.call('SET', key, value, 'PX', LOAD_KEY_MS)
end
