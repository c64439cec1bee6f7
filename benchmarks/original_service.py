"""The original's multi-GPU service, Flask on gevent, on a simulated GPU; for its interpreter."""

from __future__ import annotations

from gevent import monkey

monkey.patch_all()

import sys

from flask import Flask, Response, jsonify, request
from gevent.pywsgi import WSGIServer

from service_streamer import Streamer
from simulated import SimulatedGPU

app = Flask(__name__)
streamer: Streamer


@app.route("/stream", methods=["POST"])
def stream() -> Response:
    return jsonify(streamer.predict(request.form.getlist("s")))


if __name__ == "__main__":
    streamer = Streamer(
        SimulatedGPU, batch_size=64, max_latency=0.1, worker_num=1, cuda_devices=(0, 1, 2, 3)
    )
    streamer._wait_for_worker_ready()
    server = WSGIServer(("127.0.0.1", int(sys.argv[1])), app, log=None)
    server.start()
    print("serving", flush=True)
    server.serve_forever()
