-- wrk -t2 -c128 -d20s -s scripts/streamer.lua http://127.0.0.1:5005/stream
-- Posts one sentence per request, in turn, and says at the end how many were not answered with 2xx.

local sentences = {
   "Happy birthday to [MASK].",
   "twinkle twinkle [MASK] star.",
   "the answer to life, the [MASK], and everything.",
   "[MASK] birthday to you.",
}

local function encode(text)
   return (text:gsub("[^%w%-%._~]", function(char) return string.format("%%%02X", char:byte()) end))
end

local requests = {}
local turn = 0

-- Runs once in each thread: a request costs nothing but its sending.
function init()
   local headers = { ["Content-Type"] = "application/x-www-form-urlencoded" }
   for i, sentence in ipairs(sentences) do
      requests[i] = wrk.format("POST", nil, headers, "s=" .. encode(sentence))
   end
end

function request()
   turn = turn % #requests + 1
   return requests[turn]
end

-- wrk counts a status above 399 as an error, and answers nothing with 3xx here.
function done(summary)
   local errors = summary.errors
   io.write(string.format(
      "answers: %d, not 2xx: %d, socket errors: %d, timeouts: %d\n",
      summary.requests,
      errors.status,
      errors.connect + errors.read + errors.write,
      errors.timeout
   ))
end
