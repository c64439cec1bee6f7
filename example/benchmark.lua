-- wrk -t2 -c128 -d20s -s example/benchmark.lua http://127.0.0.1:5005/stream
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/x-www-form-urlencoded"
wrk.body = "s=Happy+birthday+to+%5BMASK%5D."
