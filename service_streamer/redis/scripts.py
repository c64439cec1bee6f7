"""The names of the keys, and the Lua scripts, which Redis runs atomically.

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

-- The first entry of a stream, such as a host's inbox, which names its model.
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

# -- of clients

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

# -- of worker hosts

#: A host joins, or restores its keys. KEYS calls, inbox, model. ARGV its name, its life in ms,
#: prefix of the inboxes' names, its model, maximum number of other hosts' calls to claim, after how
#: long in ms, whether only if Redis has run for that long, its model's description, and whether it
#: is new: one that has served may come back whatever others serve by now. Returns Redis's time in
#: ms; other models, because of which it may not join; its own claims, some of which
#: it may not know after a lost connection; calls taken over: id, fields, number of hosts that
#: claimed it; whether there may be more; and whether dead hosts' calls were claimed, not only left
#: ones.
JOIN = Script("""
local calls, name, inboxes = KEYS[1], ARGV[1], ARGV[3]
redis.call('PERSIST', calls)  -- after a first write, lack of memory refuses no other
local others = {}
for _, other in ipairs(hosts(calls, inboxes)) do
  local theirs = card(inboxes .. other)['model'] or ''
  if theirs ~= '' and theirs ~= ARGV[4] then others[#others + 1] = theirs end
end
if #others > 0 and ARGV[9] == '1' then return {milliseconds(), others, {}, {}, 0, 0} end
if redis.call('EXISTS', KEYS[2]) == 0 then
  redis.call('XADD', KEYS[2], '*', 'model', ARGV[4])
end
for key, start in pairs({[calls] = '0', [KEYS[2]] = '$'}) do
  local made = redis.pcall('XGROUP', 'CREATE', key, 'hosts', start, 'MKSTREAM')
  if made.err and not string.find(made.err, 'BUSYGROUP') then return made end
end
redis.call('XGROUP', 'CREATECONSUMER', calls, 'hosts', name)
redis.call('PERSIST', calls)
redis.call('PEXPIRE', KEYS[2], ARGV[2])
put(KEYS[3], 'm', ARGV[8], ARGV[2])
local claimed = {}
local found = redis.call('XPENDING', calls, 'hosts', '-', '+', 100000, name)
for _, pending in ipairs(found) do  -- XREADGROUP would count another claim
  local entry = redis.call('XRANGE', calls, pending[1], pending[1])[1]
  if entry then table.insert(claimed, {entry[1], entry[2], pending[4]}) end
end
local idle = tonumber(ARGV[6])
if ARGV[7] == '1' then
  local info = redis.pcall('INFO', 'server')  -- not every user may
  local uptime = type(info) == 'string' and string.match(info, 'uptime_in_seconds:(%d+)')
  if uptime and uptime * 1000 < idle then idle = LEFT end
end
local taken, more = take(calls, name, tonumber(ARGV[5]), idle)
return {milliseconds(), {}, claimed, taken, more, idle < LEFT and 1 or 0}
""")

#: A host's sign of life for itself and its claims. KEYS calls, inbox, model. ARGV its name, its
#: life in ms, prefix of the inboxes' names, after how long in ms it may claim calls of others, its
#: model's description ('' before it has joined), ids of its claims. Returns Redis's time in ms; the
#: ids that another host has claimed; and whether there are calls to claim by ``TAKE``, of which it
#: also finds a word in its inbox.
KEEP = Script("""
local calls, name = KEYS[1], ARGV[1]
local kept, gone = {}, {}
redis.call('PERSIST', calls)
redis.call('PEXPIRE', KEYS[2], ARGV[2])
if ARGV[5] ~= '' then put(KEYS[3], 'm', ARGV[5], ARGV[2]) end
for i = 6, #ARGV do
  table.insert(owner(calls, ARGV[i]) == name and kept or gone, ARGV[i])
end
for i = 1, #kept, 1000 do
  local some = {unpack(kept, i, math.min(i + 999, #kept))}
  table.insert(some, 'JUSTID')
  redis.call('XCLAIM', calls, 'hosts', name, 0, unpack(some))
end
hosts(calls, ARGV[3])
local left = #redis.call('XPENDING', calls, 'hosts', 'IDLE', ARGV[4], '-', '+', 1)
if left > 0 and ARGV[5] ~= '' then redis.call('XADD', KEYS[2], 'NOMKSTREAM', '*', 'left', '') end
return {milliseconds(), gone, left}
""")

#: A host claims calls left by others. KEYS calls. ARGV its name, their maximum number, after
#: how long in ms. Returns the claims as ``JOIN``, and whether there may be more.
TAKE = Script("""
local claimed, more = take(KEYS[1], ARGV[1], tonumber(ARGV[2]), ARGV[3])
return {claimed, more}
""")

#: A host hands out outputs of streams. KEYS calls, its orders, then for each client its key, that
#: of its replies and that of what is unread. ARGV its name, life of replies in ms, maximum number
#: of unread replies, that of bytes of outputs in them, which one message may exceed, how many
#: orders it has followed, their ids, then for each client a message with outputs ('' for none), how
#: many calls have their first outputs in it, how many have others, and the ids of both. Returns the
#: orders that there are, and for each client 1; 0 if it is gone; -1 if too much is unread, also if
#: there was no message; or the ids of those calls that are no longer this host's: another one may
#: go on with them. Except for 1 nothing was written for it.
OUTPUTS = Script("""
local calls, orders, name = KEYS[1], KEYS[2], ARGV[1]
local at = 6 + ARGV[5]
for i = 6, at - 1 do redis.call('XDEL', orders, ARGV[i]) end
if at > 6 and redis.call('XLEN', orders) == 0 then redis.call('DEL', orders) end
local answers = {}
for i = 3, #KEYS, 3 do
  local replies, unread = KEYS[i + 1], 0
  local message, begun, last = ARGV[at], at + 2 + ARGV[at + 1], at + 2 + ARGV[at + 1] + ARGV[at + 2]
  local gone, answer = {}, 1
  for j = at + 3, last do
    if owner(calls, ARGV[j]) ~= name then gone[#gone + 1] = ARGV[j] end
  end
  if redis.call('EXISTS', KEYS[i]) == 0 then
    answer = 0
  elseif #gone > 0 then
    answer = gone
  else
    local entries = redis.call('XLEN', replies)
    if entries > 0 then unread = tonumber(card(KEYS[i + 2])['b'] or 0) end
    if unread > tonumber(ARGV[4]) or entries >= tonumber(ARGV[3]) then answer = -1 end
    unread = unread + #message
  end
  if answer == 1 and message ~= '' then
    for j = at + 3, begun do
      redis.call('XCLAIM', calls, 'hosts', name, 0, ARGV[j], 'RETRYCOUNT', BEGUN, 'JUSTID')
    end
    redis.call('XADD', replies, '*', 'p', message)
    redis.call('PEXPIRE', replies, ARGV[2])
    put(KEYS[i + 2], 'b', string.format('%.0f', unread), ARGV[2])
  end
  answers[#answers + 1] = answer
  at = last + 1
end
return {redis.call('XRANGE', orders, '-', '+', 'COUNT', 1000), answers}
""")

#: A host answers calls. KEYS calls, then for each client its key and that of its replies. ARGV life
#: of replies in ms, the host's name, then for each call its id, the number of its client among KEYS
#: (0: no reply; below 0: a notice), the reply, and whether it is a stream (1 or 0), which is
#: answered only by the host that has it. Calls that another host has answered, and clients that are
#: gone, get no reply. Returns how many calls another host had answered.
FINISH = Script("""
local late, replies = 0, {}
for i = 3, #ARGV, 4 do
  local is_mine = ARGV[i + 3] == '0' or owner(KEYS[1], ARGV[i]) == ARGV[2]
  if is_mine and redis.call('XACK', KEYS[1], 'hosts', ARGV[i]) == 1 then
    redis.call('XDEL', KEYS[1], ARGV[i])
    local client = tonumber(ARGV[i + 1])
    if client < 0 then
      local key = KEYS[1 - 2 * client]
      if redis.call('EXISTS', KEYS[-2 * client]) == 1 then
        redis.call('XADD', key, '*', 'n', ARGV[i + 2])
        redis.call('PEXPIRE', key, ARGV[1])
      end
    elseif client > 0 then
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

#: A host sets aside a malformed message. KEYS calls, dead. ARGV its id, the host's name, the
#: reason, how many to keep, for how long in ms, and how many bytes of each.
SET_ASIDE = Script("""
local entry = redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[1])[1]
if entry then
  redis.call('PERSIST', KEYS[1])  -- after a first write, lack of memory refuses no other
  local fields, message = entry[2], ''
  for i = 1, #fields, 2 do
    if fields[i] == 'm' then message = fields[i + 1] end
  end
  redis.call('XADD', KEYS[2], 'MAXLEN', ARGV[4], '*', 'id', ARGV[1], 'host', ARGV[2],
    'reason', ARGV[3], 'bytes', #message, 'start', string.sub(message, 1, ARGV[6]))
  redis.call('PEXPIRE', KEYS[2], ARGV[5])
end
""")

#: A host leaves its unfinished claims to other hosts, before newer calls, if their clients still
#: exist. KEYS calls, inbox, model, orders. ARGV its name, prefix of the inboxes' names, then the
#: known ids and the keys of their clients. Returns how many calls it has left to others.
LEAVE = Script("""
local calls, name, inboxes = KEYS[1], ARGV[1], ARGV[2]
local back, clients = 0, {}
for i = 3, #ARGV, 2 do clients[ARGV[i]] = ARGV[i + 1] end
redis.call('DEL', KEYS[2], KEYS[4])
local found = redis.pcall('XPENDING', calls, 'hosts', '-', '+', 100000, name)
for _, pending in ipairs(found.err and {} or found) do
  local id, client = pending[1], clients[pending[1]]
  if client and redis.call('EXISTS', client) == 0 then
    redis.call('XACK', calls, 'hosts', id)
    redis.call('XDEL', calls, id)
  else
    -- The id stays: its client knows it. This claim does not count as an attempt.
    redis.call('XCLAIM', calls, 'hosts', name, 0, id,
      'IDLE', 10 * LEFT, 'RETRYCOUNT', math.max(0, pending[4] - 1), 'JUSTID')
    back = back + 1
  end
end
local others = hosts(calls, inboxes)
if #others == 0 then redis.call('DEL', KEYS[3]) end
if back > 0 then
  for _, other in ipairs(others) do
    redis.call('XADD', inboxes .. other, 'NOMKSTREAM', '*', 'left', name)
  end
end
tidy(calls, inboxes)
return back
""")
