"""The names of the keys, and the Lua scripts of clients, which Redis runs atomically.

    key                                     what
    ---                                     ----
    {service_streamer:PREFIX}:calls         stream of calls: d = deadline in milliseconds of
                                            Redis's clock, 0 for none; m = message. Claimed calls
                                            are pending in the consumer group ``hosts``
    {service_streamer:PREFIX}:host:NAME     stream, inbox of a live worker host; its first entry
                                            names the model
    {service_streamer:PREFIX}:orders:NAME   stream of what clients ask of this host: name = what, of
                                            ``TELL``; value = id of the call
    {service_streamer:PREFIX}:model         stream of one entry while a host lives: m = message, the
                                            description of the model
    {service_streamer:PREFIX}:client:NAME   number of calls that a live client has sent, and the
                                            ids of its last batch
    {service_streamer:PREFIX}:replies:NAME  stream of its replies: r = message, any number of them;
                                            p = message with outputs of streams, see ``OUTPUTS``;
                                            n = notice that a host could not read a call
    {service_streamer:PREFIX}:unread:NAME   stream of one entry: b = how many bytes of outputs wait
                                            for the client among its replies
    {service_streamer:PREFIX}:dead          stream of malformed messages, see ``SET_ASIDE``

The braces keep the keys of a prefix on one node of a cluster. Finished calls are deleted, so the
length of the stream of calls is the number of open calls.
"""

from __future__ import annotations

import hashlib
from typing import Final

#: The consumer group of the worker hosts.
GROUP: Final = "hosts"


class Keys:
    """The keys of one prefix."""

    def __init__(self, prefix: str) -> None:
        self._root = f"{{service_streamer:{prefix}}}:"
        self.calls = self._root + "calls"
        self.dead = self._root + "dead"
        self.model = self._root + "model"
        self.inboxes = self._root + "host:"
        self.orders = self._root + "orders:"

    def inbox(self, host: str) -> str:
        return self.inboxes + host

    def orders_of(self, host: str) -> str:
        return self.orders + host

    def client(self, client: str) -> str:
        return f"{self._root}client:{client}"

    def replies(self, client: str) -> str:
        return f"{self._root}replies:{client}"

    def unread(self, client: str) -> str:
        return f"{self._root}unread:{client}"


class Script:
    """A script and its SHA-1, by which Redis knows it once loaded."""

    def __init__(self, text: str) -> None:
        self.text = f"local LEFT, BEGUN = {LEFT}, {BEGUN}\n{_COMMON}{text}"
        self.sha = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()


#: Idle milliseconds that mark a call as left to other hosts. Calls of dead hosts are claimed after
#: less.
LEFT: Final = 10**8

#: What Redis counts as the number of hosts that have claimed a stream, once outputs of it were
#: written: a host that takes it over knows by that.
BEGUN: Final = 10**9

# A host is dead once its inbox has expired. Its consumer is kept while it has calls.
_COMMON = """
local function milliseconds()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function consumers(calls)
  local found = redis.pcall('XINFO', 'CONSUMERS', calls, 'hosts')
  return found.err and {} or found  -- no stream yet, or no group
end

-- Names of live hosts. Deletes dead ones without calls.
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

-- The host that has claimed a call, if any.
local function owner(calls, id)
  local found = redis.pcall('XPENDING', calls, 'hosts', id, id, 1)
  return not found.err and found[1] and found[1][2]
end

local function dictionary(flat)
  local found = {}
  for i = 1, #flat, 2 do found[flat[i]] = flat[i + 1] end
  return found
end

-- The first entry of a host's inbox: its model's name, and its life in ms.
local function card(inbox)
  local found = redis.pcall('XINFO', 'STREAM', inbox)
  local first = not found.err and dictionary(found)['first-entry']
  return first and dictionary(first[2]) or {}
end

-- Replaces the only field of a key. A stream, which needs no other rights than the inboxes.
local function put(key, field, value, life)
  redis.call('DEL', key)
  redis.call('XADD', key, '*', field, value)
  redis.call('PEXPIRE', key, life)
end

-- Id of the last call delivered to a host; nil if there was none.
local function delivered(calls)
  local groups = redis.pcall('XINFO', 'GROUPS', calls)
  for _, flat in ipairs(groups.err and {} or groups) do
    local group = dictionary(flat)
    if group['name'] == 'hosts' then return group['last-delivered-id'] end
  end
end

-- Claims for a host the oldest calls that have been idle for so long. Returns of each the id, the
-- fields and how many hosts have claimed it, including this one; and whether there may be more.
local function take(calls, name, most, idle)
  local claimed = {}
  if most <= 0 then
    return claimed, #redis.call('XPENDING', calls, 'hosts', 'IDLE', idle, '-', '+', 1)
  end
  -- One by one: XAUTOCLAIM does not return the previous host.
  local found = redis.call('XPENDING', calls, 'hosts', 'IDLE', idle, '-', '+', most)
  for _, pending in ipairs(found) do
    local id, before, count = pending[1], pending[2], pending[4] + 1
    local entry = redis.call(
      'XAUTOCLAIM', calls, 'hosts', name, idle, id, 'COUNT', 1)[2][1]
    if entry and entry[1] == id and entry[2] then
      if before == name then  -- lost with a connection, not with a host
        count = count - 1
        redis.call('XCLAIM', calls, 'hosts', name, 0, id, 'RETRYCOUNT', count, 'JUSTID')
      end
      table.insert(claimed, {id, entry[2], count})
    elseif #redis.call('XRANGE', calls, id, id) == 0 then
      redis.call('XACK', calls, 'hosts', id)  -- deleted: no host can compute it
    end
  end
  return claimed, #found == most and 1 or 0
end

-- After Redis's clock has gone back, earlier claims are in the future and would not age. So their
-- age counts from now, and so do the lives of hosts.
local function renew(calls, inboxes)
  for _, consumer in ipairs(consumers(calls)) do
    local inbox = inboxes .. consumer[2]
    local life = tonumber(card(inbox)['life'])
    if life and redis.call('PTTL', inbox) > life then redis.call('PEXPIRE', inbox, life) end
  end
  local found = redis.pcall('XPENDING', calls, 'hosts', '-', '+', 100000)
  for _, pending in ipairs(found.err and {} or found) do
    if pending[3] == 0 then
      redis.call('XCLAIM', calls, 'hosts', pending[2], 0, pending[1],
        'IDLE', 0, 'RETRYCOUNT', pending[4], 'JUSTID')
    end
  end
end

-- Deletes the empty stream when the last client or host leaves. If a host may be dead, the stream
-- is left to expire; a new client or host calls PERSIST.
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

#: A client sends calls, in order, up to the limit.
#: KEYS calls, client. ARGV maximum of calls, life of the client in ms, position of the first call,
#: then for each its time in ms (or -1) and its message. Returns the ids of the accepted calls. A
#: client repeats a batch whose answer was lost: calls that had arrived before keep their ids.
ENQUEUE = Script("""
local value, before = redis.call('GET', KEYS[2]) or '0', {}
for word in string.gmatch(value, '%S+') do before[#before + 1] = word end
local count = tonumber(before[1])
local last = count
local room = tonumber(ARGV[1]) - redis.call('XLEN', KEYS[1])
local now = milliseconds()
local ids = {}
for i = 4, #ARGV, 2 do
  local number = ARGV[3] + (i - 4) / 2
  if number <= count then
    ids[#ids + 1] = before[#before - count + number] or ''
  elseif room > 0 then
    local left = tonumber(ARGV[i])
    local deadline = left < 0 and 0 or now + left
    ids[#ids + 1] = redis.call(
      'XADD', KEYS[1], '*', 'd', string.format('%.0f', deadline), 'm', ARGV[i + 1])
    room = room - 1
    last = number
  else
    break
  end
end
redis.call('PERSIST', KEYS[1])
if last > count then value = string.format('%.0f ', last) .. table.concat(ids, ' ') end
redis.call('SET', KEYS[2], value, 'PX', ARGV[2])
return ids
""")

#: A client's sign of life. KEYS calls, client, model. ARGV life in ms, prefix of the inboxes'
#: names, how many calls it has sent (-1 if none). Returns the models of the live hosts, the number
#: of calls, the id of the last call delivered to a host ('' for none), and the model's description
#: ('' if no host has announced one).
REFRESH = Script("""
local known = redis.call('PEXPIRE', KEYS[2], ARGV[1])
if known == 0 and tonumber(ARGV[3]) >= 0 then
  redis.call('SET', KEYS[2], ARGV[3], 'PX', ARGV[1])
end
local models = {}
for _, name in ipairs(hosts(KEYS[1], ARGV[2])) do
  models[#models + 1] = card(ARGV[2] .. name)['model'] or ''
end
return {models, redis.call('XLEN', KEYS[1]), delivered(KEYS[1]) or '',
  card(KEYS[3])['m'] or ''}
""")

#: A client gives up calls, which hosts that have claimed them drop; or has streams rest or go on.
#: KEYS calls. ARGV prefix of the inboxes' names, that of the orders', life of orders in ms, then
#: for each call its id, and drop, hold or go.
TELL = Script("""
for i = 4, #ARGV, 2 do
  local id, what = ARGV[i], ARGV[i + 1]
  local host = owner(KEYS[1], id)
  if what == 'drop' then
    redis.pcall('XACK', KEYS[1], 'hosts', id)  -- not every user may
    redis.call('XDEL', KEYS[1], id)
  end
  if host and redis.call('EXISTS', ARGV[1] .. host) == 1 then
    redis.call('XADD', ARGV[2] .. host, '*', what, id)
    redis.call('PEXPIRE', ARGV[2] .. host, ARGV[3])
  end
end
""")

#: A client has read replies. KEYS replies, unread. ARGV the id from which on they are kept, bytes
#: of outputs that the others had, life of replies in ms.
TRIM = Script("""
redis.call('XTRIM', KEYS[1], 'MINID', ARGV[1])
local left = (card(KEYS[2])['b'] or 0) - ARGV[2]
if redis.call('XLEN', KEYS[1]) == 0 or left <= 0 then
  redis.call('DEL', KEYS[2])
else
  put(KEYS[2], 'b', string.format('%.0f', left), ARGV[3])
end
""")

#: A client leaves. KEYS calls, client, replies, unread. ARGV prefix of the inboxes' names.
PART = Script("""
redis.call('DEL', KEYS[2], KEYS[3], KEYS[4])
tidy(KEYS[1], ARGV[1])
""")
