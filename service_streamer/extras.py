"""Optional packages per feature.

The package index has version 0.1.2 of 2019 under this project's name, which
``service_streamer[redis]`` would install. So messages and docs name the packages themselves. A test
compares these lists with ``setup.cfg``.
"""

from __future__ import annotations

_WEB = (
    "click",
    "httptools",
    "msgspec",
    "prometheus-client",
    "python-json-logger",
    "python-multipart",
    "starlette",
    "uvloop",
)

#: The packages of each extra.
PACKAGES: dict[str, tuple[str, ...]] = {
    "cache": ("cachetools",),
    "gpu": ("nvidia-ml-py",),
    "grpc": ("grpcio", "grpcio-health-checking", "grpcio-reflection", "numpy", "protobuf"),
    "notebook": ("cloudpickle",),
    "opentelemetry": (
        "opentelemetry-api",
        "opentelemetry-exporter-otlp-proto-http",
        "opentelemetry-instrumentation-asgi",
        "opentelemetry-sdk",
    ),
    "oip": ("numpy",),
    "plot": ("matplotlib",),
    "ray": ("cloudpickle", "ray"),
    "redis": ("hiredis", "msgpack", "redis"),
    "serve": (
        *_WEB,
        "nvidia-ml-py",
        "pillow",
        "safetensors",
        "tokenizers",
        "torch",
        "transformers",
    ),
    "structured": ("llguidance",),
    "web": _WEB,
}


def missing(what: str, package: str | None, extra: str) -> str:
    """The message for a missing package.

    Args:
        what: the feature that needs it, such as an option.
        package: the missing package.
        extra: the extra in ``setup.cfg`` whose packages to install.
    """
    return f"{what} needs {package}: pip install {' '.join(PACKAGES[extra])}"
