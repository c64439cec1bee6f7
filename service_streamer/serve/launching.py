"""From the options of the command line to a service, or a worker host, that runs."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..engine.operator_signals import SAME_SIGNAL
from ..options.table import RedisWorkerOptions
from ..reporting import counted
from .command_options import AddressOptions, ServeOptions, WorkerCommandOptions
from .configuration import Configuration, NamedModel
from .hosted_model import OpenedModel
from .http.models import Models
from .http.service import Service
from .logs import LoadingProgress, configure_logging
from .opening import model_name, open_model, pool_options

if TYPE_CHECKING:
    from ..redis.redis_worker import RedisWorker

logger = logging.getLogger(__name__)


class CannotListen(Exception):
    """Nobody can be served at this address."""


def launch(
    configuration: Configuration, options: ServeOptions, same_signal: float = SAME_SIGNAL
) -> Exception | None:
    """Run ``serve`` until a signal; returns why no model could be loaded, or None.

    Args:
        options: of the service; those of the models are in the configuration.
        same_signal: see ``OperatorSignals``.

    Raises:
        CannotListen: the address is in use, or none of this machine.
        ClusterUnavailable: the Ray cluster cannot be reached, or used from here.
        ModelUnavailable: the hub has no such model, or cannot be asked for it.
        TypeError, ValueError, FileNotFoundError: options that do not fit.
    """
    from .running import run_service

    configure_logging(options.log_format, names_models=configuration.are_named)
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(listen(options))
        address = sock.getsockname()
        rpc = reserve_rpc(options)
        rpc_address = None if rpc is None else stack.enter_context(rpc).getsockname()[:2]
        opened: list[OpenedModel] = []
        try:
            for named in configuration.models:
                opened.append(open_model(named))
        except BaseException:
            for each in opened:
                each.streamer.close(drain=False)
            raise
        progress = stack.enter_context(LoadingProgress(waits_for(configuration.models)))

        def ready(models: Models, seconds: float) -> None:
            progress.close()
            announce(models, address, seconds, rpc_address)

        return run_service(
            configuration, opened, sock,
            on_ready=ready, rpc_address=rpc_address, same_signal=same_signal,
        )  # fmt: skip


def waits_for(models: Sequence[NamedModel]) -> str:
    """What a service waits for before it is ready."""
    return "; ".join(_waits_for(each) for each in models)


def _waits_for(named: NamedModel) -> str:
    options = named.options
    if options.redis_broker is not None:
        return f"a worker host at {shown_url(options.redis_broker)}"
    where = "" if options.ray is None else " of the Ray cluster"
    return f"{named.name} on {counted(options.worker_range[0], 'worker')}{where}"


def listen(options: AddressOptions) -> socket.socket:
    """The socket of a service. Raises CannotListen."""
    from .http.listening import bind

    host, port = options.host, options.port or 0
    try:
        return bind(host, port)
    except (OSError, OverflowError) as error:
        raise CannotListen(
            f"cannot listen at {host}:{port}: {error}; choose another --host or --port"
        ) from None


def reserve_rpc(options: ServeOptions) -> socket.socket | None:
    """A socket that keeps the port of --grpc-port for this service; None without that option.

    Whoever answers gRPC listens at the same address with SO_REUSEPORT, as several web processes
    have to. So this one must not listen: the kernel would deal out connections to it.

    Raises:
        CannotListen: the address is in use, or none of this machine.
    """
    host, port = options.host, options.grpc_port
    if port is None:
        return None
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock: socket.socket | None = None
    try:
        with socket.socket(family, socket.SOCK_STREAM) as alone:
            # Without SO_REUSEPORT: another service of this user would share the port otherwise.
            alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            alone.bind((host, port))
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((host, port))
    except (OSError, OverflowError) as error:
        if sock is not None:
            sock.close()
        raise CannotListen(
            f"cannot listen at {host}:{port}: {error}; choose another --host or --grpc-port"
        ) from None
    return sock


def launch_worker(options: WorkerCommandOptions) -> None:
    """Run ``worker`` until a signal.

    Raises:
        CannotListen: the port of --port is not to be had.
        ModelUnavailable: the hub has no such model, or cannot be asked for it.
        StreamerError: no worker can be started.
        TypeError, ValueError: options that do not fit.
    """
    from ..redis.redis_worker import run_until_signalled

    configure_logging(options.log_format)
    worker = make_redis_worker(options)
    with contextlib.ExitStack() as stack:
        if options.port is not None:
            from .http.hosting import Probes

            sock = listen(options)
            stack.enter_context(Probes(worker, sock))
            host, port = sock.getsockname()[:2]
            logger.info("health and metrics of this worker host are at %s:%d", host, port)
        logger.info("loading %s", model_name(options.model))
        run_until_signalled(worker)


def make_redis_worker(options: WorkerCommandOptions) -> RedisWorker:
    """The worker host of a command. Raises as ``pool_options`` does."""
    from ..redis.redis_worker import RedisWorker

    target, pool = pool_options(options)
    host = RedisWorkerOptions.select(
        {**vars(options), **vars(pool)}, model_name=model_name(options.model)
    )
    return RedisWorker(target, **host.arguments(RedisWorker))


def shown_url(url: str) -> str:
    """Without a password."""
    before, at, after = url.rpartition("@")
    return f"{before.partition('://')[0]}://***{at}{after}" if at else url


def announce(
    models: Models, address: Any, seconds: float, rpc_address: tuple[str, int] | None = None
) -> None:
    """Say where to go, now that there is something. ``address`` as sockets have it."""
    host, port = address[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    scheme = "http" if models.first.options.ssl_certfile is None else "https"
    url = f"{scheme}://{shown}:{port}"
    loaded = [each for each in models if each.failure is None]
    is_one = len(models) == 1
    what = _introduced(loaded[0]) if is_one else f"{len(loaded)} of {len(models)} models"
    text = f"serving {what} on {url} (loaded in {seconds:.1f} s)"
    if rpc_address is not None:
        text += f", gRPC on {shown}:{rpc_address[1]}"
    if not is_one:
        lines = [f"  {url}/models/{each.model}/  {_introduced(each)}" for each in loaded]
        text = "\n".join([text, *lines])
    elif loaded[0].description.get("dtype_reason"):
        text += f", in {_dtype(loaded[0])}"
    print(text, flush=True)  # noqa: T201 - what was asked for, not a log


def _introduced(service: Service) -> str:
    return f"{service.model} ({service.description.get('task', 'a model of its own')})"


def _dtype(service: Service) -> str:
    about = service.description
    return f"{about['dtype']} ({about['dtype_reason']})"
