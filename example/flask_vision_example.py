"""Run ``python example/flask_vision_example.py``: what an image shows, behind Flask.

``POST /predict`` takes a JPEG or PNG, as the body or as the field ``image`` of a form, and answers
``{"label": "star", "score": 0.99}``. Its model knows a few shapes.

With ``--decode web``, the default, images are decoded here, in a thread for each request (Pillow
lets the others go on meanwhile), and travel to the worker as arrays. With ``--decode worker`` they
travel as they came, and the worker decodes the next batch while it computes one. That is better if
this process is the busier one, as with this small model on two cores.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flask import Flask, Response, jsonify, request
from werkzeug.exceptions import BadRequest, RequestEntityTooLarge

from flask_example import Server, error_response
from service_streamer import InvalidInput, Streamer
from vision_model import SAMPLE, ManagedPixelModel, ManagedVisionModel, decode_image

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

#: The most that a client may send, in bytes. Photos are smaller.
MAX_BODY = 10_000_000

#: Images that may wait; others are refused (503). As arrays so many take 154 MB.
MAX_PENDING = 256

#: So many are decoded at once. More would not be faster, and a large one takes 100 MB meanwhile.
_decoding = threading.BoundedSemaphore(os.cpu_count() or 1)


def create_app(
    predict: Callable[[list[Any]], list[dict[str, Any]]],
    decode: Callable[[bytes], Any] | None = None,
) -> Flask:
    """The web application.

    Args:
        predict: answers for images, such as a streamer's. ``{"error": text}`` is one for a bad one.
        decode: makes of the bytes of an image what ``predict`` takes; None leaves them as they are.
    """
    app = Flask(__name__)
    app.config["MAX_CONTENT_LENGTH"] = MAX_BODY + 1

    def answer() -> Response:
        data = _read_image()
        if len(data) > MAX_BODY:  # what comes in chunks, of a length that is not told, is cut off
            raise RequestEntityTooLarge
        try:
            [shown] = predict([data if decode is None else decode(data)])
        except InvalidInput as error:
            raise BadRequest(str(error)) from None
        if "error" in shown:
            raise BadRequest(shown["error"])
        return jsonify(shown)

    def hint() -> Response:
        return Response(f"try: {_curl(request.url_root)}\n", mimetype="text/plain")

    app.add_url_rule("/", "hint", hint)
    app.add_url_rule("/predict", "predict", answer, methods=["POST"])
    app.register_error_handler(Exception, error_response)
    return app


def decode_here(data: bytes) -> NDArray[np.float32]:
    """Decodes an image, as ``decode_image`` does, when it is its turn."""
    with _decoding:
        return decode_image(data)


def _read_image() -> bytes:
    if request.mimetype != "multipart/form-data":
        return request.get_data(cache=False)
    file = request.files.get("image")
    if file is None:
        raise BadRequest("there is no file in the field image; send one: curl -F image=@star.jpg")
    data: bytes = file.read()
    return data


def _curl(url: str) -> str:
    sample = shlex.quote(os.path.relpath(SAMPLE))
    return f"curl {url}predict -H 'Content-Type: image/jpeg' --data-binary @{sample}"


def main() -> None:
    parser = argparse.ArgumentParser(description="What an image shows, behind Flask.")
    parser.add_argument(
        "--decode", choices=["web", "worker"], default="web", help="where images are decoded"
    )
    parser.add_argument("--worker-num", type=int, default=1, help="how many worker processes")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=5005)
    args = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit())  # see flask_example.py
    model, decode = (
        (ManagedPixelModel, decode_here) if args.decode == "web" else (ManagedVisionModel, None)
    )
    with Streamer(model, 32, 0.1, args.worker_num, max_pending=MAX_PENDING) as streamer:
        server = Server(args.host, args.port, create_app(streamer.predict, decode))
        if decode:
            decode(SAMPLE.read_bytes())  # the first one is slow: so it is no user's
        streamer.wait_ready()
        url = f"http://{args.host}:{server.port}/"
        where = "in the web process" if decode else "in the workers"
        print(f"serving on {url.rstrip('/')} (images are decoded {where}); try:")
        print(_curl(url), flush=True)
        server.serve_forever()  # until a signal; then closes itself


if __name__ == "__main__":
    main()
