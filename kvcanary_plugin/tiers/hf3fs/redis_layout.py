"""How :class:`~kvcanary_plugin.tiers.hf3fs.redis_index.RedisIndex` lies in Redis, and what its scripts begin with.

Every name begins with ``KEYS[1]``, which carries a hash tag, so that a namespace lies on one node of a cluster:

====================  ======  ==============================================================================
``:pages``            hash    key -> ``C|file|slot|generation`` or ``W|file|slot|token|until``
``:tick``             string  orders uses, numbers reservations
``:files``            hash    file -> path
``:f:FILE:meta``      hash    ``slots``, ``epoch``, ``next`` (first slot never used)
``:f:FILE:free``      list    slots given back
``:f:FILE:lru``       zset    slot of a committed page -> tick of its last use
``:f:FILE:keys``      hash    slot -> key, of committed pages and of reservations
``:f:FILE:writing``   hash    slot -> ``token|until``
``:f:FILE:leases``    hash    slot -> ``readers|lease|until``
``:f:FILE:retired``   set     slots not to be used
====================  ======  ==============================================================================

Times are milliseconds of the server's clock. Generations exceed what a Lua number can hold and stay strings.
"""

from __future__ import annotations

LOST = "KVCANARY_LOST"  # the error that says: this file is not known here, or was taken over

PRELUDE = """
local P = KEYS[1]
local call = redis.call
local function of(file, name) return P .. ':f:' .. file .. ':' .. name end
local function now()
  local t = call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end
local function page(key)  -- state, file, slot, generation or token, until
  local text = call('HGET', P .. ':pages', key)
  if not text then return nil end
  return string.match(text, '^(%u)|(%x+)|(%d+)|(%d+)|?(%d*)$')
end
local function put(key, ...) call('HSET', P .. ':pages', key, table.concat({...}, '|')) end
local function tick(count) return call('INCRBY', P .. ':tick', count or 1) end
local function give_back(file, slot)
  call('HDEL', of(file, 'writing'), slot)
  call('HDEL', of(file, 'keys'), slot)
  call('HDEL', of(file, 'leases'), slot)
  call('ZREM', of(file, 'lru'), slot)
  call('RPUSH', of(file, 'free'), slot)
end
local function owns(file, slot, token)
  local text = call('HGET', of(file, 'writing'), slot)
  return text and string.match(text, '^(%d+)|') == token
end
local function forget_claim(file, slot, token)  -- the key of a reservation, unless a later one has it
  local key = call('HGET', of(file, 'keys'), slot)
  if not key then return end
  local state, at, where, held = page(key)
  if state == 'W' and at == file and where == slot and held == token then call('HDEL', P .. ':pages', key) end
end
local function is_read(file, slot, time)
  local text = call('HGET', of(file, 'leases'), slot)
  if not text then return false end
  local readers, _, till = string.match(text, '^(%d+)|(%d+)|(%d+)$')
  return tonumber(readers) > 0 and tonumber(till) > time
end
local function check(file, epoch)
  if call('HGET', of(file, 'meta'), 'epoch') ~= epoch then return redis.error_reply('KVCANARY_LOST ' .. file) end
end
"""
