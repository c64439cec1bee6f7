"""Every option of the constructors, declared once: its type, default, values and sentence.

The classes are groups of options, and each part of the package takes the group that it needs. A
constructor takes one object with all groups that it has: ``StreamerOptions`` is a
``BatchingOptions``. Which options a constructor has is said by its signature. Docstrings and
reference pages are derived from this, and the options of the commands build upon it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from . import kinds
from .checks import Device, Workers, device_names, worker_range
from .kinds import Options, option


@dataclass(frozen=True, kw_only=True)
class PendingOptions(Options):
    """How many calls may wait."""

    max_pending: int | None = option(
        None, kinds.count().or_none("no bound"),
        "Upper bound on the items that wait; calls beyond it fail at once with Overloaded.",
        "Of each call at most two full batches count: others overtake the rest. Set it in a web "
        "service.",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class BatchingOptions(Options):
    """How calls are batched."""

    batch_size: int = option(
        64, kinds.count(), "Upper bound on the items of a batch.",
        "Rarely set. Lower it if the model is slower with large batches than with medium ones.",
    )  # fmt: skip
    max_latency: float = option(
        0.1, kinds.seconds(zero=True),
        "Upper bound on the time that an item waits for other items while a worker is free, in "
        "seconds.",
        "Rarely set: whether waiting pays is learned, and a lone caller never waits.",
    )  # fmt: skip
    max_batch_cost: float | None = option(
        None, kinds.number().or_none("no bound"), "Upper bound on items × longest item.",
        "It bounds the memory of a batch. An item beyond it is computed alone.",
        shown="no bound",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LengthOptions(Options):
    """What an item costs."""

    length: Callable[[Any], float] | str | None = option(
        None, kinds.FUNCTION.or_none("that of the model's class"),
        "Function that returns the cost of an item, in any unit, or where to import it: "
        '"package.module:function".',
        "Items of similar cost share a batch. It is called in the process of the caller, for each "
        "item. The default is the method length(item) of the model's class; without one each item "
        "counts one.",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class HangOptions(Options):
    """How long a worker may take."""

    batch_timeout: float | Literal["auto"] | None = option(
        "auto", kinds.TIME_LIMIT.or_auto(),
        "How long a worker may compute one batch, in seconds; then it is killed and replaced.",
        '"auto" allows 60 s, twice the timeout of the calls in the batch, or ten times the longest '
        "batch so far, whichever is most. It allows at least 600 s for calls without a timeout and "
        "for the first ten batches, and one hour for the first ten if neither calls nor streamer "
        "have a timeout.",
    )  # fmt: skip
    start_timeout: float | Literal["auto"] | None = option(
        "auto", kinds.TIME_LIMIT.or_auto(),
        "How long a worker may load its model, in seconds; then it is killed and replaced.",
        '"auto" allows one hour, and later ten times as long as loading took, but at least 600 s.',
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ScaleOptions(Options):
    """How many workers there are."""

    worker_num: Workers = option(
        1, kinds.WORKERS,
        "Number of workers, which are processes that hold the model; or the least and the most.",
        "With (1, 16) the streamer starts workers while calls wait longer than 50 ms and than two "
        "full batches take, and ends them when the load has been low for some time. Processor "
        "cores and shared memory are divided by the most.",
    )  # fmt: skip

    @property
    def worker_range(self) -> tuple[int, int]:
        """The least and the most workers."""
        return worker_range(self.worker_num)

    @property
    def most_workers(self) -> int:
        """How many workers there may be."""
        return self.worker_range[1]


@dataclass(frozen=True, kw_only=True)
class PlacementOptions(Options):
    """Where workers are, and what they may use there."""

    cuda_devices: Sequence[Device] | Literal["auto"] | None = option(
        None, kinds.DEVICES.or_none("leave the devices alone").or_auto(),
        "Devices of the workers in turn: GPU numbers, strings, UUIDs or cpu.",
        "A worker sees its device only. GPUs are numbered as in the process that starts the "
        "workers: with CUDA_VISIBLE_DEVICES=4,5 they are 0 and 1. A worker whose GPU is missing "
        'does not start. "auto" gives several workers all visible GPUs in turn. With None every '
        "worker sees all GPUs, and most models use the first.",
    )  # fmt: skip
    devices_per_worker: int = option(
        1, kinds.count(), "Number of devices that each worker gets.",
        "For a model that is larger than one GPU. It must divide the number of devices. With 2 and "
        "cuda_devices=(0, 1, 2, 3) there are places for two workers, and the first sees GPUs 0 and "
        "1. A model of your own spreads itself over them.",
    )  # fmt: skip
    cpu_threads: int | Literal["auto"] | None = option(
        "auto", kinds.count().or_none("no change").or_auto(),
        "Threads of each worker for numeric libraries on the CPU (OpenMP, MKL, OpenBLAS, torch, "
        "tokenizers).",
        '"auto" divides the cores among the workers and respects variables that you set. 1 is best '
        "on cores that other programs use too.",
    )  # fmt: skip
    preprocess_workers: int = option(
        0, kinds.count(least=0),
        "Number of processes of each worker that run the model's preprocess; 0 runs it in the "
        "worker itself.",
        "For slow Python code, such as the decoding of images. Each batch is split among them. The "
        "model needs stages, and loads what preprocess needs in init_preprocess.",
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        count, devices = self.devices_per_worker, self.cuda_devices
        if count == 1 or devices == "auto":
            return
        if devices is None:
            raise ValueError(
                f'devices_per_worker={count} needs cuda_devices; name the devices, or give "auto"'
            )
        names = device_names(devices)
        if "cpu" in names:
            raise ValueError(
                f"devices_per_worker={count} is for GPUs, and the devices include the cpu"
            )
        if len(names) % count:
            raise ValueError(
                f"devices_per_worker={count} must divide the number of devices, which is "
                f"{len(names)}"
            )


@dataclass(frozen=True, kw_only=True)
class WorkerOptions(PlacementOptions, ScaleOptions):
    """How worker processes are placed and started."""

    model_init_args: Sequence[Any] | None = option(
        None, kinds.ARGUMENTS.or_none("none"), "Positional arguments of init_model."
    )
    model_init_kwargs: Mapping[str, Any] | None = option(
        None, kinds.NAMED_ARGUMENTS.or_none("none"), "Keyword arguments of init_model."
    )
    mp_start_method: str = option(
        "spawn", kinds.choice("spawn", "fork", "forkserver"), "How worker processes are started.",
        'With "fork" nothing needs to be picklable. But CUDA and threads must not have been used '
        "before, a worker that is started again may inherit a lock that is never released if no "
        'start_timeout is set, and gevent is refused. With "forkserver" the main module is '
        "imported before the worker's environment is set.",
    )  # fmt: skip
    shared_memory_limit: int | None = option(
        None, kinds.count(0, more=", in bytes").or_none("a quarter of the machine's memory"),
        "Upper bound on the shared memory for large items and results, in bytes.",
        "With 0, and beyond the bound, they go through a pipe, which is slower.",
    )  # fmt: skip
    wait_for_worker_ready: bool = option(
        False, kinds.FLAG,
        "Whether the constructor returns only when every worker has loaded its model.",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SharingOptions(Options):
    """Whether the same item is computed once for several callers."""

    deduplicate: bool = option(
        False, kinds.FLAG,
        "Whether identical items that are in flight at the same time are computed once.",
        "Items are identical if they pickle to the same bytes. For models whose result depends on "
        "the item only.",
    )  # fmt: skip
    cache_size: int = option(
        0, kinds.count(least=0), "Number of items whose results are kept for later callers.",
        "More than 0 includes deduplicate, and needs the package cachetools. Beyond it the results "
        "that were not used for longest are dropped.",
    )  # fmt: skip
    cache_ttl: float | None = option(
        None, kinds.TIME_LIMIT, "How long results are kept, in seconds.",
        shown="while there is room",
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cache_ttl is not None and not self.cache_size:
            raise ValueError("cache_ttl is of no use without a cache; set cache_size, too")

    @property
    def deduplicates(self) -> bool:
        return self.deduplicate or self.cache_size > 0


@dataclass(frozen=True, kw_only=True)
class CallerOptions(Options):
    """What holds for the calls of a process."""

    worker_timeout: float | None = option(
        20.0, kinds.TIME_LIMIT,
        "How long predict and apredict wait for results, in seconds.",
        "The variable service_streamer.service_streamer.WORKER_TIMEOUT sets the default of all "
        "streamers.",
    )  # fmt: skip
    trace: Path | None = option(
        None, kinds.file().or_none("no trace"),
        "File that records when calls arrive, for the simulator.",
        "It has the time, the number of items and the lengths of each call, not the items. With "
        "several web processes put {pid} into the name.",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class HostPoolOptions(Options):
    """Whether several processes of a host have their workers in common."""

    shared: str | None = option(
        None, kinds.POOL_NAME.or_none("workers of its own"),
        "Name of the pool that all processes of this user on this host share; the first starts it.",
        "The pool has the model once, one queue and one scheduler, for gunicorn -w 4 say. All its "
        "processes need the same model, code and options.",
    )  # fmt: skip
    linger: float = option(
        10.0, kinds.seconds(zero=True),
        "How long the pool stays after its last process has left, in seconds.",
        "The longest of what the processes ask for. For shared only.",
    )  # fmt: skip
    pool_log: Path | None = option(
        None, kinds.file().or_none("NAME.log in the pool's directory"),
        "File to which the pool appends its log, and what its workers print.",
        "If it is renamed or removed, the pool begins a new one; running workers print into the "
        "old one. That of the process that starts the pool counts. For shared only.",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class StreamerOptions(
    HostPoolOptions,
    CallerOptions,
    SharingOptions,
    WorkerOptions,
    HangOptions,
    LengthOptions,
    BatchingOptions,
    PendingOptions,
):
    """All options of ``Streamer``, and so of ``ThreadedStreamer``."""

    tenant_weights: Mapping[str, float] = option(
        None, kinds.named_numbers(), "Relative weight per tenant (default 1).",
        'With {"paying": 3} that tenant gets three times the share of another one while both have '
        "calls that wait.",
    )  # fmt: skip
    retry: bool = option(
        True, kinds.FLAG, "Whether an item may be computed twice.",
        "Set it to False for models with side effects. Then all items of a lost batch fail.",
    )  # fmt: skip
    max_attempts: int = option(
        3, kinds.count(), "Worker crashes that an item may be involved in before it fails.",
        "An item that crashed a worker while it was alone in the batch is to blame. The other "
        "items of a batch fail only if so many items crash workers that the search for them was "
        "ended.",
    )  # fmt: skip
    isolate_errors: bool = option(
        True, kinds.FLAG,
        "Whether a batch on which the model raises is run again in smaller parts, to find the "
        "items that it raises on.",
        "If not, all calls of such a batch fail with SharedBatchError.",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ResourceOptions(Options):
    """What each worker asks a Ray cluster for."""

    num_gpus: float = option(
        1.0, kinds.number(zero=True),
        "GPUs of each worker; 0 for a model on the CPU, 0.5 for half of one.",
        "Ray gives each worker GPUs of its own, and the worker sees no others.",
    )  # fmt: skip
    num_cpus: float = option(
        1.0, kinds.number(zero=True), "Cores that each worker holds of its node.",
        "Ray counts them, and sets the threads of numeric libraries by them. It does not bind the "
        "worker to them.",
    )  # fmt: skip
    resources: Mapping[str, float] | None = option(
        None,
        kinds.named_numbers(zero=True).or_none("no others"),
        "Other resources that each worker holds, by name.",
    )
    runtime_env: Mapping[str, Any] | None = option(
        None, kinds.NAMED_ARGUMENTS.or_none("that of this process"),
        "What Ray brings to the node before the worker starts, such as packages.",
        '{"working_dir": "."} brings the modules of the folder. It is Ray\'s runtime_env. It holds '
        "for the whole process if this connects to Ray; if the process is connected already, Ray "
        "takes no folders.",
        shown="nothing",
    )  # fmt: skip
    scheduling_strategy: Any = option(
        None, kinds.STRATEGY.or_none("that of Ray: fill a node, then the next"),
        'Which node a worker goes to: "SPREAD", or an object of Ray\'s, such as a '
        "PlacementGroupSchedulingStrategy.",
    )  # fmt: skip

    @property
    def amounts(self) -> dict[str, float]:
        """All that a worker holds, by the names that Ray gives to it."""
        named = {"CPU": self.num_cpus, "GPU": self.num_gpus, **(self.resources or {})}
        return {name: amount for name, amount in named.items() if amount}


@dataclass(frozen=True, kw_only=True)
class RayStreamerOptions(ResourceOptions, StreamerOptions):
    """All options of ``RayStreamer``."""

    address: str | None = option(
        None, kinds.text().or_none("the cluster that runs here"), "Address of the Ray cluster.",
        "Without it: the cluster that this process is connected to, else the one that RAY_ADDRESS "
        "names or that runs on this machine, else a new one on this machine.",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RedisOptions(Options):
    """Which Redis, and which model there."""

    redis_broker: Any = option(
        "localhost:6379", kinds.BROKER,
        "Address of Redis: host:port or a redis://, rediss:// or unix:// URL.",
        "Or a redis.Redis client, whose connections are used.",
        is_private=True,
    )  # fmt: skip
    prefix: str = option(
        "", kinds.text(pattern=r"[^{}\0]*", words="a string without braces and zero bytes"),
        "Name that keeps the models on one Redis apart; the same on all sides.",
    )  # fmt: skip
    secret: str | bytes | None = option(
        None, kinds.SECRET.or_none("unsigned messages"),
        "Key that signs messages in Redis, at least 16 bytes; the same on all sides.",
        is_private=True,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class BrokerOptions(RedisOptions):
    """What clients and worker hosts do with Redis."""

    serializer: Literal["msgpack", "pickle"] = option(
        "msgpack", kinds.choice("msgpack", "pickle"),
        "Format of items and results in Redis; the same on all sides.",
        '"msgpack" takes plain data, arrays and tensors. "pickle" takes any object, and needs a '
        "secret.",
    )  # fmt: skip
    error_types: Sequence[type[BaseException]] = option(
        (), kinds.ERROR_TYPES,
        "Exceptions of models that are raised here as themselves, besides the built-in ones.",
        'Others become ModelError, which names them. With "pickle" it is not needed.',
    )  # fmt: skip
    max_message_bytes: int = option(
        32 << 20,
        kinds.count(least=1024),
        "Upper bound on the bytes of one call, or of its results.",
    )
    reply_ttl: float = option(
        120.0, kinds.seconds(),
        "How long replies are kept for a client that cannot fetch them, in seconds.",
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.serializer == "pickle" and self.secret is None:
            raise ValueError(
                'serializer="pickle" needs a secret that every side has: whoever can write to '
                "Redis could run code here otherwise"
            )


@dataclass(frozen=True, kw_only=True)
class RedisStreamerOptions(BrokerOptions, CallerOptions, SharingOptions, PendingOptions):
    """All options of ``RedisStreamer``."""

    max_pending: int = option(
        100_000, kinds.count(),
        "Upper bound on the calls of one prefix that wait or are computed; calls beyond it fail "
        "with Overloaded.",
        "It counts the calls of all clients. Each client has its own bound.",
    )  # fmt: skip
    answer_timeout: float | None = option(
        600.0, kinds.TIME_LIMIT,
        "How long a call without a timeout may make no progress, in seconds.",
        "It fails then. In the queue, each call that hosts claim before it is progress. Once a "
        "host has claimed it, only its answer and its outputs are.",
    )  # fmt: skip
    drain_timeout: float | None = option(
        60.0, kinds.TIME_LIMIT,
        "How long close waits for open calls that make no progress, in seconds.",
        "Then the open calls fail with StreamerClosed.",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RedisWorkerOptions(BrokerOptions, StreamerOptions):
    """All options of ``RedisWorker``."""

    claim_timeout: float = option(
        5.0, kinds.seconds(),
        "Silence of a worker host after which other hosts take over its calls, in seconds.",
        "They look every third of it, so it takes at most four thirds.",
    )  # fmt: skip
    model_name: str | None = option(
        None, kinds.text().or_none("that of its class or function"),
        "Name by which the hosts of a prefix know that they serve the same model.",
    )  # fmt: skip
    worker_num: int = option(
        1, kinds.count(more=" (a worker host does not scale: start more hosts)"),
        "Number of workers, which are processes that hold the model.",
    )  # fmt: skip
