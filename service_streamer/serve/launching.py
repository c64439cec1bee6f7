"""From the options of the command line to a service, or a worker host, that runs."""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..engine.item_lengths import find_function
from ..options.checks import Devices
from ..streamer import BaseStreamer, Streamer
from ..workers.diagnosis import counted
from .http.service import Service
from .http.web_options import ServiceOptions
from .logs import configure_logging

__all__ = ["CannotListen", "ModelUnavailable", "launch", "launch_worker", "model_options"]

logger = logging.getLogger(__name__)

Given = Mapping[str, Any]

_PIPELINE = "service_streamer.pipelines:PipelineModel"
_CUSTOM = "service_streamer.pipelines:CustomModel"
_PIPELINE_LENGTH = "service_streamer.pipelines.sizes:item_length"

#: Unless it is given, so many batches may wait for each worker: seconds of work, as a rule.
_BATCHES_WAITING = 16
#: And no fewer inputs than this, however small batches are: callers come by the dozen.
_LEAST_WAITING = 256

#: For each worker so many requests may be open whose images are as large as those of a request may
#: be: seconds of work. How many workers there are behind Redis is not known here; arbitrary.
_LARGE_REQUESTS = 4
_WORKERS_BEHIND_REDIS = 8

#: Seconds between two lines that say that a model still loads, where a line cannot be redrawn.
_PATIENCE = 15.0


class CannotListen(Exception):
    """Nobody can be served at this address."""


class ModelUnavailable(Exception):
    """The hub has no such model, or cannot be asked for it."""


def launch(given: Given) -> Exception | None:
    """Run ``serve`` until a signal; returns why the model could not be loaded, or None.

    Args:
        given: the options of the command line, by their names.

    Raises:
        CannotListen: the address is in use, or none of this machine.
        ModelUnavailable: the hub has no such model, or cannot be asked for it.
        TypeError, ValueError, FileNotFoundError: options that do not fit.
    """
    from .running import run_service

    configure_logging(given["log_format"])
    options = service_options(given)
    sock = listen(given)
    address = sock.getsockname()
    streamer: BaseStreamer
    try:
        if given["redis"]:
            streamer = make_redis_streamer(given, given["redis"])
            waits_for = f"a worker host at {shown_url(given['redis'])}"
        else:
            streamer = Streamer(
                **model_options(given),
                **sharing_options(given),
                worker_timeout=given["timeout"],  # by which a hang is told from slow batches
                max_pending=options.max_pending,
            )
            waits_for = f"{model_name(given['model'])} on {counted(given['workers'], 'worker')}"
    except BaseException:
        sock.close()
        raise
    with Progress(waits_for) as progress:

        def ready(service: Service, seconds: float) -> None:
            progress.close()
            announce(service, address, seconds)

        return run_service(streamer, options, sock, given["server"], on_ready=ready)


def listen(given: Given) -> socket.socket:
    """The socket of a service. Raises CannotListen."""
    from .http.listening import bind

    host, port = given["host"], given["port"]
    try:
        return bind(host, port)
    except (OSError, OverflowError) as error:
        raise CannotListen(
            f"cannot listen at {host}:{port}: {error}; choose another --host or --port"
        ) from None


def launch_worker(given: Given) -> None:
    """Run ``worker`` until a signal.

    Raises:
        CannotListen: the port of --port is not to be had.
        ModelUnavailable: the hub has no such model, or cannot be asked for it.
        StreamerError: no worker can be started.
        TypeError, ValueError: options that do not fit.
    """
    from ..redis.redis_worker import RedisWorker, run_until_signalled

    configure_logging(given["log_format"])
    options = model_options(given)
    worker = RedisWorker(
        options.pop("predict_function_or_model"),
        redis_broker=given["redis"],
        prefix=given["prefix"],
        secret=given["secret"],
        model_name=model_name(given["model"]),
        allow_other_models=given["allow_other_models"],
        **options,
    )
    with contextlib.ExitStack() as stack:
        if given["port"] is not None:
            from .http.hosting import Probes

            sock = listen(given)
            stack.enter_context(Probes(worker, sock))
            host, port = sock.getsockname()[:2]
            logger.info("health and metrics of this worker host are at %s:%d", host, port)
        logger.info("loading %s", model_name(given["model"]))
        run_until_signalled(worker)


def model_options(given: Given) -> dict[str, Any]:
    """What a pool needs to compute the model.

    Of a model on the hub the revision is looked up here, once for all workers: they load the same
    commit, also one that is started again when a newer one is there.

    Raises:
        ModelUnavailable: the hub has no such model, or cannot be asked for it.
        ValueError: options that do not fit.
    """
    model = given["model"]
    kwargs: dict[str, Any]
    length: Any = _PIPELINE_LENGTH
    if model is not None and ":" in model and not Path(model).exists():
        length = _custom_length(given["length"])
        target, kwargs = _CUSTOM, {"target": model, "has_lengths": length is not None}
    else:
        target = _PIPELINE
        kwargs = {
            **_pinned(model, given["revision"], given["task"]),
            "dtype": given["dtype"],
            "batch_size": given["batch_size"],
        }
    devices: Devices = "auto"
    if given["devices"] and list(given["devices"]) != ["auto"]:
        devices = [int(each) if each.isdecimal() else each for each in given["devices"]]
    return {
        "predict_function_or_model": target,
        "model_init_kwargs": kwargs,
        "batch_size": given["batch_size"],
        "max_latency": given["max_latency"],
        "worker_num": given["workers"],
        "cuda_devices": devices,
        "cpu_threads": given["cpu_threads"],
        "length": length,
        "max_batch_cost": given["max_batch_cost"],
        "batch_timeout": given["batch_timeout"],
        "start_timeout": given["start_timeout"],
    }


def _pinned(model: str | None, revision: str | None, task: str | None) -> dict[str, str | None]:
    """Which model the workers load: of the hub's one commit."""
    from ..pipelines.hub import name_and_revision, resolve
    from ..pipelines.loading import locate_model
    from ..pipelines.tasks import ALIASES, TASKS

    if model is None or Path(model).exists():
        return {"model": model, "task": task}
    try:
        name, revision = name_and_revision(locate_model(model), revision)
        found = resolve(name, revision)
    except FileNotFoundError as error:
        raise ModelUnavailable(str(error)) from error
    if found.away:
        logger.warning(
            "the hub cannot be asked (%s): %s is loaded from the cache, at commit %s",
            found.away, name, found.commit,
        )  # fmt: skip
    else:
        logger.info("revision %s of %s is commit %s", found.revision, name, found.commit)
    if task is None and ALIASES.get(found.task or "", found.task) in TASKS:
        task = found.task
    # A branch's name is passed on with its commit, so that the cache learns what it means.
    return {
        "model": name,
        "task": task,
        "revision": found.revision,
        "commit": found.commit,
    }


def _custom_length(place: str | None) -> Any:
    """Of the items of ``CustomModel``."""
    if place is None:
        return None
    from ..pipelines.sizes import length_of_inputs

    try:
        return length_of_inputs(find_function(place))
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--length {place} cannot be imported: {error}") from error


def service_options(given: Given) -> ServiceOptions:
    """How the web tier answers."""
    return ServiceOptions(
        model=None if given["redis"] else model_name(given["model"]),
        timeout=given["timeout"],
        max_body=given["max_body"],
        max_pending=_max_pending(given),
        batch_size=None if given["redis"] else given["batch_size"],
        api_keys=tuple(given["api_key"]),
        priority_header=_header(given["priority_header"]),
        tenant_header=_header(given["tenant_header"]),
        max_pixels=given["max_pixels"],
        max_large_pixels=_max_large_pixels(given),
        max_audio_seconds=given["max_audio_seconds"],
        max_characters=given["max_characters"],
        max_tokens=given["max_tokens"],
        write_timeout=given["write_timeout"],
        max_unread=given["max_unread"],
        allowed_hosts=tuple(given["allowed_host"]),
        is_traced=given["opentelemetry"],
        debug=given["debug"],
    )


def _header(name: str | None) -> bytes:
    """As ASGI has names of headers."""
    return (name or "").lower().encode()


def _max_large_pixels(given: Given) -> int:
    """Of one web process. Those that share a worker host of their own share its bound, too."""
    is_ours = not given["redis"] or given.get("has_own_host", False)
    workers: int = given["workers"] if is_ours else _WORKERS_BEHIND_REDIS
    most: int = given["max_pixels"]
    processes: int = given["web_workers"]
    return max(most, _LARGE_REQUESTS * workers * most // processes)


def _max_pending(given: Given) -> int:
    if given["max_pending"] is not None:
        return int(given["max_pending"])
    batches = _BATCHES_WAITING * given["workers"]
    return int(max(_LEAST_WAITING, batches * given["batch_size"]))


def make_redis_streamer(given: Given, url: str) -> BaseStreamer:
    """The web tier's way to the worker hosts."""
    from ..errors import InvalidInput
    from ..redis.redis_streamer import RedisStreamer

    return RedisStreamer(
        url,
        given["prefix"],
        worker_timeout=None,
        max_pending=_max_pending(given),
        secret=given["secret"],
        error_types=(InvalidInput,),
        **sharing_options(given),
    )


def sharing_options(given: Given) -> dict[str, Any]:
    """What a streamer needs to compute nothing twice."""
    return {name: given[name] for name in ("deduplicate", "cache_size", "cache_ttl")}


def model_name(model: str | None) -> str:
    """What users read: of a folder its last part."""
    if model is None:
        return "text_infilling"
    path = Path(model)
    return path.resolve().name if path.is_dir() else model


def shown_url(url: str) -> str:
    """Without a password."""
    before, at, after = url.rpartition("@")
    return f"{before.partition('://')[0]}://***{at}{after}" if at else url


def announce(service: Service, address: Any, seconds: float) -> None:
    """Say where to go, now that there is something. ``address`` as sockets have it."""
    host, port = address[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    task = service.description.get("task", "a model of its own")
    url = f"http://{shown}:{port}"
    text = f"serving {service.model} ({task}) on {url} (loaded in {seconds:.1f} s)"
    print(text, flush=True)  # noqa: T201 - what was asked for, not a log


class Progress:
    """Says that a model is loading, for as long as it is: nobody should wonder whether it hangs."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._began = time.monotonic()
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._can_redraw = sys.stderr.isatty()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._thread.join()

    def close(self) -> None:
        """It is loaded, or never will be."""
        with self._lock:
            if not self._is_over.is_set() and self._can_redraw:
                sys.stderr.write("\r\x1b[K")
            self._is_over.set()

    def _run(self) -> None:
        self._say()
        while not self._is_over.wait(0.5 if self._can_redraw else _PATIENCE):
            self._say()

    def _say(self) -> None:
        seconds = time.monotonic() - self._began
        with self._lock:
            if self._is_over.is_set():
                return
            if self._can_redraw:
                sys.stderr.write(f"\r\x1b[Kwaiting for {self._what} ... {seconds:.0f} s")
                sys.stderr.flush()
            else:
                logger.info("waiting for %s ... %.0f s", self._what, seconds)
