"""A simulated model on the original service_streamer 0.1.2 with Flask on gevent; for .original."""
# mypy: ignore-errors
# ruff: noqa: E402

from __future__ import annotations

from gevent import monkey

monkey.patch_all()

import argparse

from flask import Flask, jsonify, request
from gevent.pywsgi import WSGIServer

import simulated
from service_streamer import Streamer

app = Flask(__name__)


@app.route("/predict", methods=["POST"])
def predict():
    return jsonify(streamer.predict([request.get_json()["inputs"]])[0])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--wait", type=float, required=True, help="milliseconds")
    args = parser.parse_args()
    streamer = Streamer(
        getattr(simulated, args.model),
        batch_size=64,
        max_latency=args.wait / 1000,
        worker_num=1,
        cuda_devices=(0,),
    )
    streamer._wait_for_worker_ready()
    WSGIServer(("127.0.0.1", args.port), app, log=None).serve_forever()
