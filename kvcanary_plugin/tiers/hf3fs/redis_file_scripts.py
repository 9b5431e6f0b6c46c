"""What happens to page files inside of Redis: taken over, emptied, made anew. Each script is one atomic step.

Names and values are described in :mod:`~kvcanary_plugin.tiers.hf3fs.redis_layout`.
"""

from __future__ import annotations

from .redis_layout import PRELUDE

# ARGV: 1 to retire, (key, file, slot, generation)...  ->  how many were still there. Without ARGV[1]: only looks.
WITHDRAW = (
    PRELUDE
    + """
local count = 0
for i = 2, #ARGV, 4 do
  local state, file, slot, generation = page(ARGV[i])
  if state == 'C' and file == ARGV[i + 1] and slot == ARGV[i + 2] and generation == ARGV[i + 3] then
    count = count + 1
    if ARGV[1] ~= '' then
      call('HDEL', P .. ':pages', ARGV[i])
      give_back(file, slot)
      if ARGV[1] == '1' then
        call('RPOP', of(file, 'free'))
        call('SADD', of(file, 'retired'), slot)
      end
    end
  end
end
return count
"""
)

# ARGV: file, epoch, deadline ms, "all" or "keys", key...  ->  {slot, token}...
EVICT = (
    PRELUDE
    + """
local file = ARGV[1]
local lost = check(file, ARGV[2])
if lost then return lost end
local slots, out, till = {}, {}, string.format('%d', now() + ARGV[3])
if ARGV[4] == 'all' then
  slots = call('ZRANGE', of(file, 'lru'), 0, -1)
else
  for i = 5, #ARGV do
    local state, at, slot = page(ARGV[i])
    if state == 'C' and at == file then slots[#slots + 1] = slot end
  end
end
for _, slot in ipairs(slots) do
  local key = call('HGET', of(file, 'keys'), slot)
  if key then  -- a key that was named twice is gone by now
    local token = string.format('%d', tick())
    call('HDEL', P .. ':pages', key)
    call('HDEL', of(file, 'keys'), slot)
    call('HDEL', of(file, 'leases'), slot)
    call('ZREM', of(file, 'lru'), slot)
    call('HSET', of(file, 'writing'), slot, token .. '|' .. till)
    out[#out + 1] = {slot, token}
  end
end
return out
"""
)

# ARGV: file, epoch, slots, path  ->  1 if the index describes the file as it was left
ATTACH = (
    PRELUDE
    + """
local file, epoch, meta = ARGV[1], tonumber(ARGV[2]), of(ARGV[1], 'meta')
local held = call('HMGET', meta, 'epoch', 'slots')
if not held[1] or held[2] ~= ARGV[3] then return 0 end
if tonumber(held[1]) ~= epoch and tonumber(held[1]) ~= epoch - 1 then return 0 end
local all = call('HGETALL', of(file, 'writing'))
for j = 1, #all, 2 do
  forget_claim(file, all[j], string.match(all[j + 1], '^(%d+)|'))
  give_back(file, all[j])
end
for _, slot in ipairs(call('SMEMBERS', of(file, 'retired'))) do call('RPUSH', of(file, 'free'), slot) end
call('DEL', of(file, 'retired'))
call('HSET', meta, 'epoch', ARGV[2])
call('HSET', P .. ':files', file, ARGV[4])
return 1
"""
)

# ARGV: file, at most so many  ->  how many pages were forgotten; 0: all are, and the file with them
FORGET = (
    PRELUDE
    + """
local file = ARGV[1]
call('DEL', of(file, 'meta'))  -- from here on nobody reserves in it
local some = call('HSCAN', of(file, 'keys'), '0', 'COUNT', ARGV[2])[2]
for j = 1, #some, 2 do
  local _, at = page(some[j + 1])
  if at == file then call('HDEL', P .. ':pages', some[j + 1]) end
  call('HDEL', of(file, 'keys'), some[j])
end
if call('HLEN', of(file, 'keys')) == 0 then
  for _, name in ipairs({'free', 'lru', 'keys', 'writing', 'leases', 'retired'}) do call('DEL', of(file, name)) end
  call('HDEL', P .. ':files', file)
  return 0
end
return #some / 2
"""
)

# ARGV: file, (slot, key, generation)...  ->  how many became committed; the others are held by another file
ADOPT = (
    PRELUDE
    + """
local file, mark, count = ARGV[1], tick(), 0
for i = 2, #ARGV, 3 do
  local state = page(ARGV[i + 1])
  if state == 'C' then
    call('RPUSH', of(file, 'free'), ARGV[i])
  else
    put(ARGV[i + 1], 'C', file, ARGV[i], ARGV[i + 2])
    call('HSET', of(file, 'keys'), ARGV[i], ARGV[i + 1])
    call('ZADD', of(file, 'lru'), mark, ARGV[i])
    count = count + 1
  end
end
return count
"""
)
