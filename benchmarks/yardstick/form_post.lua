-- wrk -t4 -c128 -d4s -s form_post.lua http://127.0.0.1:8000/stream -- 'a sentence' 'another'
-- Posts one of them after the other as the field s of a form, as the original's script does, and
-- says at the end, in one line of JSON, how it went.

local requests = {}
local turn = 0

local function encode(text)
   return (text:gsub("[^%w%-%._~]", function(char) return string.format("%%%02X", char:byte()) end))
end

-- Runs once in each thread: a request costs nothing but its sending.
function init(args)
   local headers = { ["Content-Type"] = "application/x-www-form-urlencoded" }
   for i, sentence in ipairs(args) do
      requests[i] = wrk.format("POST", nil, headers, "s=" .. encode(sentence))
   end
end

function request()
   turn = turn % #requests + 1
   return requests[turn]
end

-- wrk counts a status above 399 as an error; nothing here answers with 3xx.
function done(summary)
   local errors = summary.errors
   io.write(string.format(
      '\n{"requests": %d, "seconds": %f, "not_2xx": %d, "sockets": %d, "timeouts": %d}\n',
      summary.requests,
      summary.duration / 1e6,
      errors.status,
      errors.connect + errors.read + errors.write,
      errors.timeout
   ))
end
