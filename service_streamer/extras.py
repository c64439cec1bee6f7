"""Optional packages: what to install for which feature, in words that work.

The package index still has version 0.1.2 of 2019 under this project's name. So messages and docs
name the packages themselves, and not ``service_streamer[redis]``, which would install that. A test
compares these lists with ``setup.cfg``.
"""

from __future__ import annotations

__all__ = ["PACKAGES", "missing"]

_WEB = (
    "click",
    "httptools",
    "msgspec",
    "prometheus-client",
    "python-json-logger",
    "python-multipart",
    "starlette",
    "uvicorn",
    "uvloop",
)

#: The packages of each extra.
PACKAGES: dict[str, tuple[str, ...]] = {
    "cache": ("cachetools",),
    "granian": ("granian",),
    "notebook": ("cloudpickle",),
    "opentelemetry": (
        "opentelemetry-api",
        "opentelemetry-exporter-otlp-proto-http",
        "opentelemetry-instrumentation-asgi",
        "opentelemetry-sdk",
    ),
    "plot": ("matplotlib",),
    "redis": ("hiredis", "msgpack", "redis"),
    "serve": (*_WEB, "pillow", "safetensors", "tokenizers", "torch", "transformers"),
    "web": _WEB,
}


def missing(what: str, package: str | None, extra: str) -> str:
    """What to tell users who lack a package.

    Args:
        what: needs it, such as an option.
        package: that could not be imported.
        extra: of ``setup.cfg``, whose packages are named.
    """
    return f"{what} needs {package}: pip install {' '.join(PACKAGES[extra])}"
