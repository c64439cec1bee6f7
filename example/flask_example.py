"""Run ``python example/flask_example.py``: a model behind Flask, made faster by a streamer.

``/naive`` calls the model for each request; ``/stream`` batches the requests of many users. Both
take one or more fields ``s``, by GET or POST, and answer a JSON list. ``/draw`` streams a model
whose outputs come one by one: ``curl -N localhost:5005/draw -d '{"shape": "heart", "points": 5}'``.
 With ``--streamer`` the model
lives in worker processes, and this one never loads torch unless somebody asks ``/naive``.

``gunicorn -c redis_streamer_gunicorn.py flask_example:app`` serves ``/stream`` from many processes,
by way of Redis.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, Any, cast

from flask import Flask, Response, jsonify, request
from werkzeug.exceptions import BadRequest, HTTPException
from werkzeug.serving import ThreadedWSGIServer, WSGIRequestHandler
from werkzeug.wsgi import LimitedStream, get_content_length

from bert_model import ManagedBertModel, SentenceEncoder, TextInfillingModel
from http_errors import MAX_PENDING, answer_to
from service_streamer import Streamer, ThreadedStreamer
from streaming import HEADERS, MEDIA_TYPE, Service, events, start_drawing

if TYPE_CHECKING:
    from service_streamer import RedisStreamer

EXAMPLE = "s=Happy birthday to [MASK]."

#: What ``app`` asks. A web server that imports this file sets it in each of its processes.
streamer: RedisStreamer | Streamer | ThreadedStreamer | None = None


def create_app(
    streamer: RedisStreamer | Streamer | ThreadedStreamer | None = None,
    check: Callable[[list[str]], None] | None = None,
    naive: Callable[[list[str]], list[str]] | None = None,
    drawing: Service | None = None,
) -> Flask:
    """The web application.

    Args:
        streamer: answers ``/stream``; None asks the one of this module, whichever it is by then.
        check: raises ValueError for a bad sentence, before it joins a batch with other users'.
        naive: answers ``/naive``, without a streamer; None leaves that out.
        drawing: has the streamer of ``/draw``; None leaves that out.
    """
    app = Flask(__name__)

    def sentences() -> list[str]:
        batch = (request.form if request.method == "POST" else request.args).getlist("s")
        if not batch:
            raise BadRequest(f"there is no field s; send one or more, such as {EXAMPLE}")
        if check is not None:
            try:
                check(batch)
            except ValueError as error:
                raise BadRequest(str(error)) from None
        return batch

    def hint() -> Response:
        text = f"try: curl -X POST {request.url_root}stream -d '{EXAMPLE}'\n"
        return Response(text, mimetype="text/plain")

    def add(path: str, predict: Callable[[list[str]], list[str]]) -> None:
        methods = ["GET", "POST"]
        app.add_url_rule(path, path, lambda: jsonify(predict(sentences())), methods=methods)

    app.add_url_rule("/", "hint", hint)
    add("/stream", predict if streamer is None else streamer.predict)
    if naive is not None:
        add("/naive", naive)
    if drawing is not None:
        app.add_url_rule("/draw", "draw", lambda: draw(drawing), methods=["POST"])
    app.register_error_handler(Exception, error_response)
    return app


def draw(drawing: Service) -> Response:
    """The picture after each step, as server-sent events."""
    stream = drawing.start().stream(request.get_json(force=True))
    return Response(events(stream, request.path), mimetype=MEDIA_TYPE, headers=HEADERS)


def error_response(error: Exception) -> Response:
    """Every error as JSON: ours, the model's, and Flask's own (404, 405, ...)."""
    if isinstance(error, HTTPException):
        response = jsonify(error=error.description)
        response.status_code = error.code or 500
        response.headers.extend(h for h in error.get_headers() if h[0] != "Content-Type")
        return response
    status, text, headers = answer_to(error, request.path)
    response = jsonify(error=text)
    response.status_code = status
    response.headers.update(headers)
    return response


def predict(batch: list[str]) -> list[str]:
    """Asks the streamer of this module."""
    if streamer is None:
        raise RuntimeError(
            "flask_example.streamer is not set: start gunicorn with -c redis_streamer_gunicorn.py"
        )
    return streamer.predict(batch)


@functools.cache
def encoder() -> SentenceEncoder:
    return SentenceEncoder()


#: For web servers that import this file.
app = create_app(check=lambda batch: encoder().check(batch))


class RequestHandler(WSGIRequestHandler):
    """Keeps connections open between requests, which Werkzeug's own handler does not."""

    server: Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or head and body, sent apart, cost a client 40 ms
    timeout = 60  # seconds for which a silent client may hold a thread

    def run_wsgi(self) -> None:
        environ = self.make_environ()
        body = LimitedStream(cast(IO[bytes], self.rfile), get_content_length(environ) or 0)
        is_plain = "Transfer-Encoding" not in self.headers
        if is_plain:
            environ["wsgi.input"] = body
        response = Response.from_app(self.server.app, environ)
        with contextlib.closing(response):  # also when the client has gone: it ends a stream
            is_stream = "Content-Length" not in response.headers
            content = response.iter_encoded() if is_stream else [response.get_data()]
            # What is left of a body that nobody read would be taken for the next request, and a
            # stream ends with its connection.
            if is_stream or not (is_plain and body.is_exhausted) or self.server.is_stopping:
                self.close_connection = True
            self.send_response(response.status_code)
            for name, value in response.headers:
                self.send_header(name, value)
            if self.close_connection:
                self.send_header("Connection", "close")
            self.end_headers()
            for part in content:
                self.wfile.write(part)

    def log_request(self, *_: Any) -> None:
        """No line per request."""


class Server(ThreadedWSGIServer):
    """A thread per connection; closing it answers the requests that were accepted."""

    daemon_threads = False  # server_close() waits for them
    is_stopping = False

    def __init__(self, host: str, port: int, app: Flask) -> None:
        self._connections: set[socket.socket] = set()
        super().__init__(host, port, app, RequestHandler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._connections.discard(request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        self.is_stopping = True
        for connection in self._connections.copy():
            with contextlib.suppress(OSError):  # the client has gone
                connection.shutdown(socket.SHUT_RD)  # wakes the threads that wait for a request
        super().server_close()


def load_when_used() -> Callable[[list[str]], list[str]]:
    """The plain model, loaded in this process by the first call."""
    lock = threading.Lock()
    model: TextInfillingModel | None = None

    def predict(batch: list[str]) -> list[str]:
        nonlocal model
        with lock:
            if model is None:
                model = TextInfillingModel()
        return model.predict(batch)

    return predict


def main() -> None:
    parser = argparse.ArgumentParser(description="A model behind Flask, with and without batching.")
    parser.add_argument("--streamer", action="store_true", help="model in worker processes")
    parser.add_argument("--worker-num", type=int, default=1, help="with --streamer: how many")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=5005)
    args = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        # Not KeyboardInterrupt: after one that was raised within an exec(), as imports use it,
        # Python ends as if killed by the signal. A second signal does not wait for anybody.
        signal.signal(number, lambda *_: sys.exit())
    streamer: Streamer | ThreadedStreamer
    if args.streamer:
        workers = args.worker_num
        streamer = Streamer(ManagedBertModel, 64, 0.1, workers, max_pending=MAX_PENDING)
        naive, mode = load_when_used(), f"Streamer, {args.worker_num} worker process(es)"
    else:
        model = TextInfillingModel()
        streamer = ThreadedStreamer(model.predict, 64, 0.1, max_pending=MAX_PENDING)
        naive, mode = model.predict, "ThreadedStreamer"
    with streamer, contextlib.closing(Service(start_drawing)) as drawing:
        app = create_app(streamer, SentenceEncoder().check, naive, drawing)
        server = Server(args.host, args.port, app)
        streamer.wait_ready()
        url = f"http://{args.host}:{server.port}"
        print(f"serving on {url} ({mode}); try:")
        print(f"curl -X POST {url}/stream -d '{EXAMPLE}'", flush=True)
        server.serve_forever()  # until a signal; then closes itself


if __name__ == "__main__":
    main()
