"""What the original's README gives for it: never measured here, on hardware of its own."""

from __future__ import annotations

__all__ = ["PUBLISHED", "PUBLISHED_HARDWARE", "PUBLISHED_LATENCY"]

#: As that README names it; as many of them as there were workers.
PUBLISHED_HARDWARE = "Titan Xp (1 to 4), CUDA 9.0, PyTorch 1.1"

#: Requests per second over HTTP, sentences per second through futures: by section, number of
#: workers and system. "by-hand" is what it calls "Batched".
PUBLISHED: dict[str, dict[int, dict[str, float]]] = {
    "original-flask": {
        1: {"naive": 12.78, "threaded": 207.59, "streamer": 321.70, "redis": 372.45}
    },
    "original-gevent": {
        1: {"naive": 11.62, "threaded": 211.02, "streamer": 362.69, "redis": 365.80},
        2: {"streamer": 488.40, "redis": 609.63},
        4: {"streamer": 494.20, "redis": 1034.57},
    },
    "original-futures": {
        1: {"by-hand": 422.883, "threaded": 401.01, "streamer": 399.26, "redis": 384.79},
        2: {"streamer": 742.16, "redis": 714.781},
        4: {"streamer": 1400.12, "redis": 1356.47},
    },
}

#: Seconds, the mean; it gives them for one of the tables only.
PUBLISHED_LATENCY: dict[str, dict[int, dict[str, float]]] = {
    "original-flask": {
        1: {"naive": 8.44, "threaded": 0.60335, "streamer": 0.39266, "redis": 0.34074}
    }
}
