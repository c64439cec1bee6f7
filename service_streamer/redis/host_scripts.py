"""The Lua scripts of worker hosts: see ``scripts``."""

from __future__ import annotations

from .scripts import Script

#: A host joins, or restores its keys. KEYS calls, inbox, model. ARGV its name, its life in ms,
#: prefix of the inboxes' names, its model, maximum number of other hosts' calls to claim, after how
#: long in ms, whether only if Redis has run for that long, and its model's description. Returns
#: Redis's time in ms; other models, because of which it may not join; its own claims, some of which
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
if #others > 0 then return {milliseconds(), others, {}, {}, 0, 0} end
if redis.call('EXISTS', KEYS[2]) == 0 then
  redis.call('XADD', KEYS[2], '*', 'model', ARGV[4], 'life', ARGV[2])
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
renew(calls, inboxes)
local idle = tonumber(ARGV[6])
if ARGV[7] == '1' then
  local info = redis.pcall('INFO', 'server')  -- not every user may
  local uptime = type(info) == 'string' and string.match(info, 'uptime_in_seconds:(%d+)')
  if uptime and uptime * 1000 < idle then idle = LEFT end
end
local taken, more = take(calls, name, tonumber(ARGV[5]), idle)
return {milliseconds(), {}, claimed, taken, more, idle < LEFT and 1 or 0}
""")

#: A host's sign of life for itself and its claims; it also claims calls of silent hosts. KEYS
#: calls, inbox, model. ARGV its name, its life in ms, maximum number of calls to claim, after how
#: long in ms, prefix of the inboxes' names, the expected time of Redis in ms, the tolerance, its
#: model's description ('' before it has joined), ids of its claims. Returns Redis's time in ms; the
#: ids that another host has claimed; new claims as ``JOIN``; and whether there may be more.
KEEP = Script("""
local calls, name = KEYS[1], ARGV[1]
local kept, gone, idle = {}, {}, ARGV[4]
redis.call('PERSIST', calls)
redis.call('PEXPIRE', KEYS[2], ARGV[2])
if ARGV[8] ~= '' then put(KEYS[3], 'm', ARGV[8], ARGV[2]) end
for i = 9, #ARGV do
  table.insert(owner(calls, ARGV[i]) == name and kept or gone, ARGV[i])
end
for i = 1, #kept, 1000 do
  local some = {unpack(kept, i, math.min(i + 999, #kept))}
  table.insert(some, 'JUSTID')
  redis.call('XCLAIM', calls, 'hosts', name, 0, unpack(some))
end
local step = milliseconds() - ARGV[6]
if math.abs(step) > tonumber(ARGV[7]) then
  idle = LEFT  -- after a step, the ages of claims are wrong
  if step < 0 then renew(calls, ARGV[5]) end
end
hosts(calls, ARGV[5])
local claimed, more = take(calls, name, tonumber(ARGV[3]), idle)
return {milliseconds(), gone, claimed, more}
""")

#: A host claims more calls left by others. KEYS calls. ARGV its name, their maximum number, after
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
