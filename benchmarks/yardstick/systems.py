"""On whom is measured: one entry for each row of the tables."""

from __future__ import annotations

from yardstick.plan import System

__all__ = ["SYSTEMS"]

#: Of the original: how long it waits for company, with each item anew; its default is 0.1.
_ORIGINAL = {"max_latency": (0.0001, 0.0003, 0.001, 0.005, 0.01, 0.02, 0.1)}
_BATCHED = {"timeout_ms": (0.01, 0.03, 0.1, 1.0, 5.0)}
#: And whether a replica computes in a thread, and can take calls meanwhile.
_RAY = {"batch_wait_timeout_s": (0.0, 0.001, 0.01), "in_thread": (True, False)}

_ALL = (
    # -- this project, within one's own process
    System(
        "threaded", "ThreadedStreamer", "this", {"adapter": "service_streamer", "mode": "threaded"}
    ),
    System("streamer", "Streamer", "this", {"adapter": "service_streamer", "mode": "streamer"}),
    System("redis", "RedisStreamer", "this", {"adapter": "service_streamer", "mode": "redis"}),
    # In the interpreter that has Ray Serve, so that both can be measured by one process.
    System("ray-streamer", "RayStreamer", "ray", {}),
    # -- the original
    System(
        "original-threaded",
        "original ThreadedStreamer",
        "original",
        {"adapter": "service_streamer", "mode": "threaded"},
        _ORIGINAL,
    ),
    System(
        "original-streamer",
        "original Streamer",
        "original",
        {"adapter": "service_streamer", "mode": "streamer"},
        _ORIGINAL,
    ),
    System(
        "original-redis",
        "original RedisStreamer",
        "original",
        {"adapter": "service_streamer", "mode": "redis"},
        _ORIGINAL,
    ),
    # -- others, within one's own process
    System("batched", "batched", "batched", {"adapter": "batched"}, _BATCHED),
    System("ray", "Ray Serve, handle", "ray", {"adapter": "ray"}, _RAY, rounds=1),
    System(
        "infinity",
        "infinity",
        "infinity",
        {"adapter": "infinity"},
        {
            "batch_size": (8, 16, 32),
            "lengths_via_tokenize": (False, True),
            "bettertransformer": (False, True),
        },
    ),
    # -- without anybody
    System("naive", "no batching", "this", {"service": "flask", "mode": "naive"}),
    System(
        "original-naive",
        "no batching (original's example)",
        "original",
        {"service": "flask", "mode": "naive"},
    ),
    System("by-hand", "batches of 64 by hand", "this", {"adapter": "direct"}),
    System("by-hand-one", "one by one, by hand", "this", {"adapter": "direct", "batch_size": 1}),
    System(
        "by-hand-64",
        "64 in order of arrival, by hand",
        "this",
        {"adapter": "direct", "batch_size": 64},
    ),
    System(
        "by-hand-sorted",
        "sorted beforehand, by hand",
        "this",
        {"adapter": "direct", "is_sorted": True},
        {"batch_size": (4, 8, 16, 32, 64)},
    ),
    System(
        "streamer-unsorted",
        "Streamer without length",
        "this",
        {"adapter": "service_streamer", "mode": "streamer", "has_length": False},
    ),
    System(
        "streamer-pipes",
        "Streamer, through pipes",
        "this",
        {"adapter": "service_streamer", "mode": "streamer", "shared_memory_limit": 0},
    ),
    System(
        "threaded-serial",
        "ThreadedStreamer, predict only",
        "this",
        {"adapter": "service_streamer", "mode": "threaded", "has_stages": False},
    ),
    System(
        "streamer-serial",
        "Streamer, predict only",
        "this",
        {"adapter": "service_streamer", "mode": "streamer", "has_stages": False},
    ),
    # What the operating system and the interpreter allow.
    System("bare-pipe", "a bare pipe there and back", "this", {"adapter": "bare-pipe"}),
    System("bare-locks", "bare locks, one batcher", "this", {"adapter": "bare-locks"}),
    System(
        "bare-locks-process",
        "bare locks, a worker process",
        "this",
        {"adapter": "bare-locks", "in_process": True},
    ),
    System("copy", "plain memory copy", "this", {"adapter": "copy"}),
    # -- servers
    System("serve", "service-streamer serve", "this", {"service": "serve"}),
    System(
        "serve-shared",
        "serve --web-workers 2",
        "this",
        {"service": "serve", "web_workers": 2},
    ),
    System(
        "flask-gevent",
        "Streamer in Flask on gevent",
        "this",
        {"service": "flask", "server": "gevent"},
    ),
    System(
        "original-gevent",
        "original in Flask on gevent",
        "original",
        {"service": "flask", "server": "gevent"},
        _ORIGINAL,
    ),
    System(
        "litserve",
        "LitServe",
        "litserve",
        {"service": "litserve"},
        {"wait": (0.0, 0.001, 0.005, 0.01), "api_servers": (1, 2), "queue": ("default", "fast")},
    ),
    System(
        "mosec",
        "mosec",
        "mosec",
        {"service": "mosec"},
        {"wait": (0, 1, 5, 10), "json": ("json", "msgspec")},
    ),
    System("mlserver", "MLServer", "mlserver", {"service": "mlserver", "protocol": "v2"}),
    System("ray-http", "Ray Serve, HTTP", "ray", {"service": "ray"}, _RAY, rounds=1),
)

SYSTEMS = {system.key: system for system in _ALL}
