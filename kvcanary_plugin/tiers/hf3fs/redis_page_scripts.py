"""What happens to pages inside of Redis: stored, found, read. Each script is one atomic step.

Names and values are described in :mod:`~kvcanary_plugin.tiers.hf3fs.redis_layout`.
"""

from __future__ import annotations

from .redis_layout import PRELUDE

# ARGV: file, epoch, deadline ms, grace ms, key...  ->  for each key "C", "W", false, or "slot|token"
RESERVE = (
    PRELUDE
    + """
local file, epoch, deadline, grace = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local lost = check(file, epoch)
if lost then return lost end
local time, mark, count = now(), tick(#ARGV - 3), 0
local lru, free, meta = of(file, 'lru'), of(file, 'free'), of(file, 'meta')
local out = {}
for i = 5, #ARGV do
  local state, at, slot, _, till = page(ARGV[i])
  if state == 'C' then
    out[i - 4] = 'C'
    if call('ZSCORE', of(at, 'lru'), slot) then call('ZADD', of(at, 'lru'), mark, slot) end
  elseif state == 'W' and tonumber(till) > time then
    out[i - 4] = 'W'
  end
end
local function evict()
  local from = 0
  while true do
    local slots = call('ZRANGE', lru, from, from + 63, 'WITHSCORES')
    if #slots == 0 then return nil end
    for j = 1, #slots, 2 do
      local slot = slots[j]
      if tonumber(slots[j + 1]) >= mark then return nil end
      if not is_read(file, slot, time) then
        local key = call('HGET', of(file, 'keys'), slot)
        if key then call('HDEL', P .. ':pages', key) end
        give_back(file, slot)
        return call('RPOP', free)
      end
    end
    from = from + 64
  end
end
local function reap()  -- reservations whose reply never arrived, or whose writer was lost
  local all = call('HGETALL', of(file, 'writing'))
  for j = 1, #all, 2 do
    local token, till = string.match(all[j + 1], '^(%d+)|(%d+)$')
    if tonumber(till) + grace < time then
      forget_claim(file, all[j], token)
      give_back(file, all[j])
    end
  end
  return call('LPOP', free)
end
local function allocate()
  local slot = call('LPOP', free)
  if slot then return slot end
  local fresh = tonumber(call('HGET', meta, 'next'))
  if fresh < tonumber(call('HGET', meta, 'slots')) then
    call('HSET', meta, 'next', fresh + 1)
    return string.format('%d', fresh)
  end
  return evict() or reap()
end
for i = 5, #ARGV do
  if not out[i - 4] then
    local key = ARGV[i]
    local state, _, _, _, till = page(key)
    local slot = nil
    if state == 'W' and tonumber(till) > time then  -- an earlier occurrence of it in this batch
      out[i - 4] = 'W'
    else
      slot = allocate()
    end
    if slot then
      count = count + 1
      local token = string.format('%d', mark - (#ARGV - 4) + count)
      local till_text = string.format('%d', time + deadline)
      put(key, 'W', file, slot, token, till_text)
      call('HSET', of(file, 'keys'), slot, key)
      call('HSET', of(file, 'writing'), slot, token .. '|' .. till_text)
      out[i - 4] = slot .. '|' .. token
    elseif not out[i - 4] then
      out[i - 4] = false
    end
  end
end
return out
"""
)

# ARGV: file, epoch, (slot, token, key, generation)...  ->  1 or 0 for each
COMMIT = (
    PRELUDE
    + """
local file = ARGV[1]
local lost = check(file, ARGV[2])
if lost then return lost end
local mark, out = tick(), {}
for i = 3, #ARGV, 4 do
  local slot, token, key, generation = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3]
  local state, at, where, held = page(key)
  if owns(file, slot, token) and state == 'W' and at == file and where == slot and held == token then
    put(key, 'C', file, slot, generation)
    call('HDEL', of(file, 'writing'), slot)
    call('ZADD', of(file, 'lru'), mark, slot)
    out[#out + 1] = 1
  else
    out[#out + 1] = 0
  end
end
return out
"""
)

# ARGV: file, epoch, 1 to retire, (slot, token)...
ABORT = (
    PRELUDE
    + """
local file = ARGV[1]
local lost = check(file, ARGV[2])
if lost then return lost end
for i = 4, #ARGV, 2 do
  local slot, token = ARGV[i], ARGV[i + 1]
  if owns(file, slot, token) then
    forget_claim(file, slot, token)
    give_back(file, slot)
    if ARGV[3] == '1' then
      call('RPOP', of(file, 'free'))
      call('SADD', of(file, 'retired'), slot)
    end
  end
end
return 0
"""
)

# ARGV: lease ms, key...  ->  for each key false or {file, slot, generation, lease}
LOOKUP = (
    PRELUDE
    + """
local time, mark, out = now(), tick(), {}
for i = 2, #ARGV do
  local state, file, slot, generation = page(ARGV[i])
  if state == 'C' then
    local text = call('HGET', of(file, 'leases'), slot) or '0|0|0'
    local readers, lease, till = string.match(text, '^(%d+)|(%d+)|(%d+)$')
    if readers == '0' or tonumber(till) <= time then readers, lease = '0', lease + 1 end
    local record = string.format('%d|%d|%d', readers + 1, lease, time + ARGV[1])
    call('HSET', of(file, 'leases'), slot, record)
    call('ZADD', of(file, 'lru'), mark, slot)
    out[i - 1] = {file, slot, generation, string.format('%d', lease)}
  else
    out[i - 1] = false
  end
end
return out
"""
)

# ARGV: (file, slot, lease)...
RELEASE = (
    PRELUDE
    + """
for i = 1, #ARGV, 3 do
  local text = call('HGET', of(ARGV[i], 'leases'), ARGV[i + 1])
  if text then
    local readers, lease, till = string.match(text, '^(%d+)|(%d+)|(%d+)$')
    if lease == ARGV[i + 2] and tonumber(readers) > 0 then
      call('HSET', of(ARGV[i], 'leases'), ARGV[i + 1], string.format('%d|%s|%s', readers - 1, lease, till))
    end
  end
end
return 0
"""
)

# ARGV: key...  ->  1 or 0 for each
EXISTS = (
    PRELUDE
    + """
local mark, out = tick(), {}
for i = 1, #ARGV do
  local state, file, slot = page(ARGV[i])
  out[i] = state == 'C' and 1 or 0
  if state == 'C' then call('ZADD', of(file, 'lru'), mark, slot) end
end
return out
"""
)
