"""What is done in Redis in one step, as Lua scripts, and the names of the keys.

    key                                     what
    ---                                     ----
    {service_streamer:PREFIX}:calls         stream of calls: d = deadline, in milliseconds of
                                            Redis's clock, 0 for none; m = message; o = what is
                                            said of its order, of a call for which that is. What a
                                            host has claimed is pending in its consumer group,
                                            ``hosts``
    {service_streamer:PREFIX}:host:NAME     stream, inbox of a worker host: lives while it does
    {service_streamer:PREFIX}:client:NAME   how many calls a client has put in: lives while it does
    {service_streamer:PREFIX}:replies:NAME  stream of replies to it: r = message, any number of them
    {service_streamer:PREFIX}:dead          stream of what was set aside, see ``SET_ASIDE``

The braces keep the keys of a prefix on one node of a cluster. A call that is finished is deleted,
so the length of the stream of calls is how many are waiting or being computed.
"""

from __future__ import annotations

import hashlib
from typing import Final

__all__ = [
    "ENQUEUE",
    "FINISH",
    "GROUP",
    "JOIN",
    "KEEP",
    "LEAVE",
    "PART",
    "REFRESH",
    "SET_ASIDE",
    "WITHDRAW",
    "Keys",
    "Script",
]

#: The consumer group of the worker hosts.
GROUP: Final = "hosts"


class Keys:
    """The keys of one prefix."""

    def __init__(self, prefix: str) -> None:
        self._root = f"{{service_streamer:{prefix}}}:"
        self.calls = self._root + "calls"
        self.dead = self._root + "dead"
        self.inboxes = self._root + "host:"

    def inbox(self, host: str) -> str:
        return self.inboxes + host

    def client(self, client: str) -> str:
        return f"{self._root}client:{client}"

    def replies(self, client: str) -> str:
        return f"{self._root}replies:{client}"


class Script:
    """A script, and the name by which Redis knows it once it has seen it."""

    def __init__(self, text: str) -> None:
        self.text = _COMMON + text
        self.sha = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()


# A host whose inbox is gone is dead; a consumer is kept only while it is alive or holds calls.
_COMMON = """
local function milliseconds()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function consumers(calls)
  local found = redis.pcall('XINFO', 'CONSUMERS', calls, 'hosts')
  return found.err and {} or found  -- no stream yet, or no group
end

-- The names of the hosts that are alive. Forgets dead ones of which nothing is left to claim.
local function hosts(calls, inboxes)
  local alive = {}
  for _, consumer in ipairs(consumers(calls)) do
    local name, pending = consumer[2], consumer[4]
    if redis.call('EXISTS', inboxes .. name) == 1 then
      alive[#alive + 1] = name
    elseif pending == 0 then
      redis.call('XGROUP', 'DELCONSUMER', calls, 'hosts', name)
    end
  end
  return alive
end

local function is_claimed(calls, id)
  local found = redis.pcall('XPENDING', calls, 'hosts', id, id, 1)
  return not found.err and #found > 0
end

-- The last one to leave an empty house turns off the light. Where a host has died, of which that is
-- not known yet, the stream is left to expire; whoever comes calls PERSIST.
local function tidy(calls, inboxes)
  if redis.call('EXISTS', calls) == 0 or redis.call('XLEN', calls) > 0 then return end
  local life = 0
  for _, name in ipairs(hosts(calls, inboxes)) do
    life = math.max(life, redis.call('PTTL', inboxes .. name))
  end
  if #consumers(calls) == 0 then
    redis.call('DEL', calls)
  else
    redis.call('PEXPIRE', calls, life + 1000)
  end
end
"""

#: A client puts calls in, in order, unless there are too many.
#: KEYS calls, client. ARGV most calls, life of the client in ms, number of the first one, then for
#: each its time in ms (or -1), its message and what is said of its order ('' for nothing). Returns
#: whether the client was known, and the ids of those that were accepted: '' for one that had come
#: before, in a command whose answer was lost.
ENQUEUE = Script("""
local known = redis.call('GET', KEYS[2])
local last = tonumber(known or 0)
local room = tonumber(ARGV[1]) - redis.call('XLEN', KEYS[1])
local now = milliseconds()
local ids = {}
for i = 4, #ARGV, 3 do
  local number = ARGV[3] + (i - 4) / 3
  if number <= last then
    ids[#ids + 1] = ''
  elseif room > 0 then
    local left = tonumber(ARGV[i])
    local deadline = left < 0 and 0 or now + left
    local fields = {'d', string.format('%.0f', deadline), 'm', ARGV[i + 1]}
    if ARGV[i + 2] ~= '' then
      table.insert(fields, 'o')
      table.insert(fields, ARGV[i + 2])
    end
    ids[#ids + 1] = redis.call('XADD', KEYS[1], '*', unpack(fields))
    room = room - 1
    last = number
  else
    break
  end
end
redis.call('PERSIST', KEYS[1])
redis.call('SET', KEYS[2], string.format('%.0f', last), 'PX', ARGV[2])
return {known and 1 or 0, ids}
""")

#: A client says that it is alive. KEYS calls, client. ARGV life in ms, start of names of inboxes.
#: Returns whether it was known, how many hosts are alive, and how many calls there are.
REFRESH = Script("""
local known = redis.call('PEXPIRE', KEYS[2], ARGV[1])
return {known, #hosts(KEYS[1], ARGV[2]), redis.call('XLEN', KEYS[1])}
""")

#: A client gives up calls: what no host has claimed is deleted. KEYS calls. ARGV ids.
WITHDRAW = Script("""
local deleted = 0
for _, id in ipairs(ARGV) do
  if not is_claimed(KEYS[1], id) then deleted = deleted + redis.call('XDEL', KEYS[1], id) end
end
return deleted
""")

#: A client parts. KEYS calls, client, replies. ARGV start of names of inboxes.
PART = Script("""
redis.call('DEL', KEYS[2], KEYS[3])
tidy(KEYS[1], ARGV[1])
""")

#: A host joins, or makes sure that all it needs is there. KEYS calls, inbox. ARGV its name, its
#: life in ms. Returns Redis's time in ms; and what it has claimed, of which it may not know, since
#: answers get lost with connections: the id, the fields, and how many hosts have had it.
JOIN = Script("""
redis.call('PERSIST', KEYS[1])  -- after a write Redis refuses no more for lack of memory
for key, start in pairs({[KEYS[1]] = '0', [KEYS[2]] = '$'}) do
  local made = redis.pcall('XGROUP', 'CREATE', key, 'hosts', start, 'MKSTREAM')
  if made.err and not string.find(made.err, 'BUSYGROUP') then return made end
end
redis.call('XGROUP', 'CREATECONSUMER', KEYS[1], 'hosts', ARGV[1])
redis.call('PERSIST', KEYS[1])
redis.call('PEXPIRE', KEYS[2], ARGV[2])
local claimed = {}
local found = redis.call('XPENDING', KEYS[1], 'hosts', '-', '+', 100000, ARGV[1])
for _, pending in ipairs(found) do  -- not by XREADGROUP, which would count it as one claim more
  local entry = redis.call('XRANGE', KEYS[1], pending[1], pending[1])[1]
  if entry then table.insert(claimed, {entry[1], entry[2], pending[4]}) end
end
return {milliseconds(), claimed}
""")

#: A host says that it is alive, and at work on what it has claimed; and claims what others have
#: not been at work on for long. KEYS calls, inbox. ARGV its name, its life in ms, how many to claim
#: at most, after how long in ms, where to go on, start of names of inboxes, ids of what it has
#: claimed. Returns Redis's time in ms; those of the ids that it has not any more, since another
#: host has claimed them; where to go on the next time; and of what it has claimed now the id, the
#: fields, and how many hosts have had it, this one included.
KEEP = Script("""
local calls, name, most = KEYS[1], ARGV[1], tonumber(ARGV[3])
local kept, gone, claimed, cursor = {}, {}, {}, ARGV[5]
redis.call('PERSIST', calls)
redis.call('PEXPIRE', KEYS[2], ARGV[2])
for i = 7, #ARGV do
  local found = redis.call('XPENDING', calls, 'hosts', ARGV[i], ARGV[i], 1)
  local is_ours = found[1] and found[1][2] == name
  table.insert(is_ours and kept or gone, ARGV[i])
end
for i = 1, #kept, 1000 do
  local some = {unpack(kept, i, math.min(i + 999, #kept))}
  table.insert(some, 'JUSTID')
  redis.call('XCLAIM', calls, 'hosts', name, 0, unpack(some))
end
hosts(calls, ARGV[6])
if most > 0 then
  -- Looked for one by one: XAUTOCLAIM looks at few, and does not say whose they were.
  local found = redis.call('XPENDING', calls, 'hosts', 'IDLE', ARGV[4], cursor, '+', most)
  for _, pending in ipairs(found) do
    local id, owner, count = pending[1], pending[2], pending[4] + 1
    local entry = redis.call(
      'XAUTOCLAIM', calls, 'hosts', name, ARGV[4], id, 'COUNT', 1)[2][1]
    if entry and entry[1] == id and entry[2] then
      if owner == name then  -- lost with a connection, not with a host
        count = count - 1
        redis.call('XCLAIM', calls, 'hosts', name, 0, id, 'RETRYCOUNT', count, 'JUSTID')
      end
      table.insert(claimed, {id, entry[2], count})
    end
  end
  cursor = #found == most and '(' .. found[#found][1] or '-'
end
return {milliseconds(), gone, cursor, claimed}
""")

#: A host answers calls. KEYS calls, then for each client its key and that of its replies. ARGV life
#: of replies in ms, then for each call its id, the number of its client among KEYS (0: no reply)
#: and the reply. What another host has answered meanwhile is not answered again, and clients that
#: are gone get no replies. Returns how many were not answered again.
FINISH = Script("""
local late, replies = 0, {}
for i = 2, #ARGV, 3 do
  if redis.call('XACK', KEYS[1], 'hosts', ARGV[i]) == 1 then
    redis.call('XDEL', KEYS[1], ARGV[i])
    local client = tonumber(ARGV[i + 1])
    if client > 0 then
      replies[client] = replies[client] or {}
      table.insert(replies[client], 'r')
      table.insert(replies[client], ARGV[i + 2])
    end
  else
    late = late + 1
  end
end
for client, fields in pairs(replies) do
  if redis.call('EXISTS', KEYS[2 * client]) == 1 then
    local key = KEYS[2 * client + 1]
    redis.call('XADD', key, '*', unpack(fields))
    redis.call('PEXPIRE', key, ARGV[1])
  end
end
return late
""")

#: A host sets aside a call that it cannot read. KEYS calls, dead. ARGV its id, the host's name,
#: why, how many to keep, for how long in ms, and how much of each.
SET_ASIDE = Script("""
local entry = redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[1])[1]
if entry then
  redis.call('PERSIST', KEYS[1])  -- after a write Redis refuses no more for lack of memory
  local fields, message = entry[2], ''
  for i = 1, #fields, 2 do
    if fields[i] == 'm' then message = fields[i + 1] end
  end
  redis.call('XADD', KEYS[2], 'MAXLEN', ARGV[4], '*', 'id', ARGV[1], 'host', ARGV[2],
    'reason', ARGV[3], 'bytes', #message, 'start', string.sub(message, 1, ARGV[6]))
  redis.call('PEXPIRE', KEYS[2], ARGV[5])
end
""")

#: A host leaves: what it has claimed and not finished is put in again, if its client is not gone.
#: KEYS calls, inbox. ARGV its name, start of names of inboxes, then ids and the keys of their
#: clients as far as it knows. Returns how many calls were put in again.
LEAVE = Script("""
local back, clients = 0, {}
for i = 3, #ARGV, 2 do clients[ARGV[i]] = ARGV[i + 1] end
redis.call('DEL', KEYS[2])
repeat
  local found = redis.pcall('XPENDING', KEYS[1], 'hosts', '-', '+', 1000, ARGV[1])
  if found.err then break end
  for _, pending in ipairs(found) do
    local entry = redis.call('XRANGE', KEYS[1], pending[1], pending[1])[1]
    if entry then
      local client = clients[pending[1]]
      if not client or redis.call('EXISTS', client) == 1 then
        local fields, copied = entry[2], {}
        for i = 1, math.min(#fields, 20), 2 do
          if fields[i] == 'd' or fields[i] == 'm' or fields[i] == 'o' then
            table.insert(copied, fields[i])
            table.insert(copied, fields[i + 1])
          end
        end
        if #copied > 0 then
          redis.call('XADD', KEYS[1], '*', unpack(copied))
          back = back + 1
        end
      end
      redis.call('XDEL', KEYS[1], pending[1])
    end
    redis.call('XACK', KEYS[1], 'hosts', pending[1])
  end
until #found == 0
redis.pcall('XGROUP', 'DELCONSUMER', KEYS[1], 'hosts', ARGV[1])
tidy(KEYS[1], ARGV[2])
return back
""")
