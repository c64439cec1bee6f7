-- wrk -t2 -c128 -d10s -s http_post.lua http://127.0.0.1:8000/predict -- '{"inputs": "..."}'
-- Posts one JSON body again and again, and says at the end, in one line of JSON, how it went.

local posted

-- Runs once in each thread: a request costs nothing but its sending.
function init(args)
   posted = wrk.format("POST", nil, { ["Content-Type"] = "application/json" }, args[1])
end

function request()
   return posted
end

-- wrk counts a status above 399 as an error; nothing here answers with 3xx.
function done(summary, latency)
   local errors = summary.errors
   io.write(string.format(
      '\n{"requests": %d, "seconds": %f, "not_2xx": %d, "sockets": %d, "timeouts": %d, "p50": %f, "p99": %f}\n',
      summary.requests,
      summary.duration / 1e6,
      errors.status,
      errors.connect + errors.read + errors.write,
      errors.timeout,
      latency:percentile(50) / 1e6,
      latency:percentile(99) / 1e6
   ))
end
