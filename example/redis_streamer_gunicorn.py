"""Run ``gunicorn -c redis_streamer_gunicorn.py flask_example:app``: four gevent workers, no model.

They share the models of ``redis_worker_example.py`` by way of Redis. The environment says where:
``REDIS_URL`` (localhost:6379), ``REDIS_PREFIX`` (none), ``PREDICT_TIMEOUT`` (20 seconds), ``PORT``.
gunicorn's own options, such as ``--workers`` and ``--bind``, win over what is set here.

The master runs this file. Only its workers are patched by gevent, after the fork and just before
they import the application; so nothing of ours may be imported here but in ``post_worker_init``.
"""

import logging
import os
from pathlib import Path
from typing import Any

chdir = str(Path(__file__).resolve().parent)  # where flask_example is
bind = f"127.0.0.1:{os.environ.get('PORT', '5005')}"
workers = 4
worker_class = "gevent"
preload_app = False  # a streamer does not survive a fork, nor would the patches come in time
keepalive = 5  # seconds; for so long idle connections hold up the end of a worker
loglevel = "warning"
control_socket_disable = True  # one file for all gunicorns of a user, and a thread before the fork


def when_ready(server: Any) -> None:
    url = server.LISTENERS[0]
    print(f"serving on {url} ({server.num_workers} gevent workers); try:")
    print(f"curl -X POST {url}/stream -d 's=Happy birthday to [MASK].'", flush=True)


def post_worker_init(worker: Any) -> None:
    import flask_example
    import http_errors
    from service_streamer import RedisStreamer

    logging.basicConfig(
        format="[%(asctime)s] [%(process)d] [%(levelname)s] %(message)s",  # gunicorn's
        datefmt="%Y-%m-%d %H:%M:%S %z",
    )
    worker.streamer = flask_example.streamer = RedisStreamer(
        os.environ.get("REDIS_URL") or "localhost:6379",
        os.environ.get("REDIS_PREFIX", ""),
        float(os.environ.get("PREDICT_TIMEOUT", "20")),
        max_pending=http_errors.MAX_PENDING,
    )


def worker_exit(_server: Any, worker: Any) -> None:
    streamer = getattr(worker, "streamer", None)  # none if it could not start
    if streamer is not None:
        streamer.close(drain=False)  # all is answered, or nobody waits for it any more
