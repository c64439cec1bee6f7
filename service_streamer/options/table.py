"""Every option, declared once: its type, default, check and sentence, and which fronts have it.

The classes are groups of options, and each part of the package takes the group that it needs. A
front takes one object with all groups that it has: ``StreamerOptions`` is a ``BatchingOptions``.
Sentences are for the command line's help, docstrings and reference pages alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .checks import Device, Workers, check_devices_per_worker, worker_range
from .declare import (
    RAY,
    REDIS_STREAMER,
    REDIS_WORKER,
    SERVE,
    SIMULATE,
    STREAMER,
    THREADED,
    WORKER,
    Options,
    option,
)
from .kinds import (
    Amount,
    Amounts,
    Arguments,
    Broker,
    BurstText,
    Choice,
    Count,
    Devices,
    ErrorTypes,
    File,
    Flag,
    Function,
    Header,
    HostName,
    LengthText,
    LoadText,
    Number,
    Origin,
    PoolName,
    Prefix,
    RayAddress,
    Seconds,
    Secret,
    Size,
    Strategy,
    Text,
    Weights,
    WorkerNumber,
)

_HOSTS = (STREAMER, RAY, REDIS_WORKER)
_LOCAL = (STREAMER, REDIS_WORKER)
_POOLS = (THREADED, *_HOSTS)
_MODELS = (*_HOSTS, SERVE, WORKER)
_PROCESSES = (*_LOCAL, SERVE, WORKER)
_CALLERS = (THREADED, STREAMER, RAY, REDIS_STREAMER)
_WEB = (SERVE, WORKER)
_S = (SERVE,)
_R = (RAY,)
_M = (SIMULATE,)

_TIME = Seconds(zero=True)


@dataclass(frozen=True, kw_only=True)
class PendingOptions(Options):
    """How many calls may wait."""

    max_pending: int | None = option(
        None, Count(none="no bound"),
        "Upper bound on the items that wait; calls beyond it fail at once with Overloaded.",
        (THREADED, STREAMER, RAY, REDIS_STREAMER, SERVE),
        more="Of each call at most two full batches count: others overtake the rest. Set it in a "
        "web service.",
        at={
            REDIS_STREAMER: {
                "default": 100_000,
                "kind": Count(),
                "help": "Upper bound on the calls of one prefix that wait or are computed; calls "
                "beyond it fail with Overloaded.",
                "more": "It counts the calls of all clients. Each client has its own bound.",
            },
            SERVE: {
                "help": "Upper bound on the inputs that wait; requests beyond it get 503 at once.",
                "more": "",
                "shown": "16 batches for each worker, at least 256",
            },
        },
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class BatchingOptions(PendingOptions):
    """How calls are batched."""

    batch_size: int = option(
        64, Count(), "Upper bound on the items of a batch.", (*_POOLS, SERVE, WORKER, SIMULATE),
        more="Rarely set: the best size is learned.",
    )  # fmt: skip
    max_latency: float = option(
        0.1, Seconds(zero=True),
        "Upper bound on the time that an item waits for other items while a worker is free, in "
        "seconds.",
        (*_POOLS, SERVE, WORKER, SIMULATE),
        more="Rarely set: whether waiting pays is learned, and a lone caller never waits.",
    )  # fmt: skip
    max_batch_cost: float | None = option(
        None, Number(none="no bound"), "Upper bound on items × longest item.",
        (*_POOLS, SERVE, WORKER, SIMULATE),
        more="It bounds the memory of a batch. An item beyond it is computed alone.",
        shown="no bound",
        at={
            SERVE: {"more": "Pipelines count bytes of text."},
            WORKER: {"more": "Pipelines count bytes of text."},
        },
    )  # fmt: skip
    tenant_weights: Mapping[str, float] = option(
        None, Weights(), "Relative weight per tenant (default 1).", _POOLS,
        more='With {"paying": 3} that tenant gets three times the share of another one while both '
        "have calls that wait.",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LengthOptions(Options):
    """What an item costs."""

    length: Callable[[Any], float] | str | None = option(
        None, Function(none="that of the model's class"),
        "Function that returns the cost of an item, in any unit, or where to import it: "
        '"package.module:function".',
        (*_POOLS, SERVE, WORKER),
        more="Items of similar cost share a batch. It is called in the process of the caller, for "
        "each item. The default is the method length(item) of the model's class; without one "
        "each item counts one.",
        at={
            front: {
                "help": "Where to import the function that returns the cost of an input, such as "
                "my_module:MyModel.length.",
                "more": "Inputs of similar cost share a batch. For a model of your own.",
            }
            for front in _WEB
        },
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class FaultOptions(Options):
    """What is done about faults."""

    retry: bool = option(
        True, Flag(), "Whether an item may be computed twice.", _POOLS,
        more="Set it to False for models with side effects. Then all items of a lost batch fail.",
    )  # fmt: skip
    max_attempts: int = option(
        3, Count(), "Worker crashes that an item may be involved in before it fails.", _HOSTS,
        more="An item that crashed a worker while it was alone in the batch is to blame. The "
        "other items of a batch fail only if so many items crash workers that the search for "
        "them was ended.",
    )  # fmt: skip
    isolate_errors: bool = option(
        True, Flag(),
        "Whether a batch on which the model raises is run again in smaller parts, to find the "
        "items that it raises on.",
        _POOLS,
        more="If not, all calls of such a batch fail with SharedBatchError.",
    )  # fmt: skip
    batch_timeout: float | Literal["auto"] | None = option(
        "auto", Seconds(none="no limit", auto=True),
        "How long a worker may compute one batch, in seconds; then it is killed and replaced.",
        _MODELS,
        more='"auto" allows 60 s, twice the timeout of the calls in the batch, or ten times the '
        "longest batch so far, whichever is most. It allows at least 600 s for calls without a "
        "timeout and for the first ten batches, and one hour for the first ten if neither calls "
        "nor streamer have a timeout.",
    )  # fmt: skip
    start_timeout: float | Literal["auto"] | None = option(
        "auto", Seconds(none="no limit", auto=True),
        "How long a worker may load its model, in seconds; then it is killed and replaced.",
        _MODELS,
        more='"auto" allows one hour, and later ten times as long as loading took, but at least '
        "600 s.",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class WorkerOptions(Options):
    """How worker processes are placed and started."""

    worker_num: Workers = option(
        1, WorkerNumber(),
        "Number of workers, which are processes that hold the model; or the least and the most.",
        (*_MODELS, SIMULATE),
        more="With (1, 16) the streamer starts workers while calls wait longer than 50 ms and than "
        "two full batches take, and ends them when the load has been low for some time. Processor "
        "cores and shared memory are divided by the most.",
        flag="--workers",
        at={
            SERVE: {"more": "With 1:16 workers are started and ended by the load."},
            SIMULATE: {"more": "With 1:16 workers are started and ended by the load."},
            **{
                front: {
                    "kind": WorkerNumber(fixed="a worker host does not scale: start more hosts"),
                    "help": "Number of workers, which are processes that hold the model.",
                    "more": "",
                }
                for front in (REDIS_WORKER, WORKER)
            },
        },
    )  # fmt: skip
    cuda_devices: Sequence[Device] | Literal["auto"] | None = option(
        None, Devices(none="leave the devices alone", auto=True),
        "Devices of the workers in turn: GPU numbers, strings, UUIDs or cpu.", _PROCESSES,
        more="A worker sees its device only. GPUs are numbered as in the process that starts the "
        "workers: with CUDA_VISIBLE_DEVICES=4,5 they are 0 and 1. A worker whose GPU is missing "
        'does not start. "auto" gives several workers all visible GPUs in turn. With None every '
        "worker sees all GPUs, and most models use the first.",
        flag="--devices",
        at={
            front: {
                "default": "auto",
                "more": "Such as 0,1,2,3. A worker whose GPU is missing does not start.",
                "shown": "all visible GPUs in turn; a single worker sees all",
            }
            for front in _WEB
        },
    )  # fmt: skip
    devices_per_worker: int = option(
        1, Count(), "Number of devices that each worker gets.", _PROCESSES,
        more="For a model that is larger than one GPU. It must divide the number of devices. With "
        "2 and cuda_devices=(0, 1, 2, 3) there are places for two workers, and the first sees GPUs "
        "0 and 1. A model of your own spreads itself over them.",
        at={
            front: {
                "more": "For a model that is larger than one GPU, which is spread over them by the "
                "package accelerate. It must divide the number of devices."
            }
            for front in _WEB
        },
    )  # fmt: skip
    model_init_args: Sequence[Any] | None = option(
        None, Arguments(none="none"), "Positional arguments of init_model.", _HOSTS
    )
    model_init_kwargs: Mapping[str, Any] | None = option(
        None, Arguments(none="none", named=True), "Keyword arguments of init_model.", _HOSTS
    )
    mp_start_method: str = option(
        "spawn", Choice(among=("spawn", "fork", "forkserver")), "How worker processes are started.",
        _LOCAL,
        more='With "fork" nothing needs to be picklable. But CUDA and threads must not have been '
        "used before, a worker that is started again may inherit a lock that is never released "
        'if no start_timeout is set, and gevent is refused. With "forkserver" the main module is '
        "imported before the worker's environment is set.",
    )  # fmt: skip
    cpu_threads: int | Literal["auto"] | None = option(
        "auto", Count(none="no change", auto=True),
        "Threads of each worker for numeric libraries on the CPU (OpenMP, MKL, OpenBLAS, torch, "
        "tokenizers).",
        _PROCESSES,
        more='"auto" divides the cores among the workers and respects variables that you set. 1 '
        "is best on cores that other programs use too.",
    )  # fmt: skip
    preprocess_workers: int = option(
        0, Count(least=0),
        "Number of processes of each worker that run the model's preprocess; 0 runs it in the "
        "worker itself.",
        _PROCESSES,
        more="For slow Python code, such as the decoding of images. Each batch is split among "
        "them. The model needs stages, and loads what preprocess needs in init_preprocess.",
        at={
            front: {"more": "For images, sounds, and models of your own with stages. Texts are "
                "tokenized in the worker."}
            for front in _WEB
        },
    )  # fmt: skip
    shared_memory_limit: int | None = option(
        None, Count(least=0, none="a quarter of the machine's memory", unit="bytes"),
        "Upper bound on the shared memory for large items and results, in bytes.", (STREAMER,),
        more="With 0, and beyond the bound, they go through a pipe, which is slower.",
    )  # fmt: skip
    wait_for_worker_ready: bool = option(
        False, Flag(), "Whether the constructor returns only when every worker has loaded its "
        "model.", (STREAMER, RAY),
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        check_devices_per_worker(self.devices_per_worker, self.cuda_devices)

    @property
    def worker_range(self) -> tuple[int, int]:
        """The least and the most workers."""
        return worker_range(self.worker_num)

    @property
    def most_workers(self) -> int:
        """How many workers there may be."""
        return self.worker_range[1]


@dataclass(frozen=True, kw_only=True)
class SharingOptions(Options):
    """Whether the same item is computed once for several callers."""

    deduplicate: bool = option(
        False, Flag(), "Whether identical items that are in flight at the same time are computed "
        "once.", (*_CALLERS, SERVE),
        more="Items are identical if they pickle to the same bytes. For models whose result "
        "depends on the item only.",
    )  # fmt: skip
    cache_size: int = option(
        0, Count(least=0), "Number of items whose results are kept for later callers.",
        (*_CALLERS, SERVE),
        more="More than 0 includes deduplicate, and needs the package cachetools. Beyond it the "
        "results that were not used for longest are dropped.",
    )  # fmt: skip
    cache_ttl: float | None = option(
        None, Seconds(none="no limit"), "How long results are kept, in seconds.",
        (*_CALLERS, SERVE), shown="while there is room",
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cache_ttl is not None and not self.cache_size:
            raise ValueError("cache_ttl is of no use without a cache; set cache_size, too")

    @property
    def is_on(self) -> bool:
        return self.deduplicate or self.cache_size > 0


@dataclass(frozen=True, kw_only=True)
class CallerOptions(Options):
    """What holds for the calls of a process."""

    worker_timeout: float | None = option(
        20.0, Seconds(none="no limit"), "How long predict and apredict wait for results, in "
        "seconds.", _CALLERS,
        more="The variable service_streamer.service_streamer.WORKER_TIMEOUT sets the default of "
        "all streamers.",
    )  # fmt: skip
    trace: Path | None = option(
        None, File(none="no trace"), "File that records when calls arrive, for the simulator.",
        _CALLERS,
        more="It has the time, the number of items and the lengths of each call, not the items. "
        "With several web processes put {pid} into the name.",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class HostPoolOptions(Options):
    """Whether several processes of a host have their workers in common."""

    shared: str | None = option(
        None, PoolName(none="workers of its own"),
        "Name of the pool that all processes of this user on this host share; the first starts it.",
        (STREAMER, RAY),
        more="The pool has the model once, one queue and one scheduler, for gunicorn -w 4 say. All "
        "its processes need the same model, code and options.",
    )  # fmt: skip
    linger: float = option(
        10.0, Seconds(zero=True),
        "How long the pool stays after its last process has left, in seconds.", (STREAMER, RAY),
        more="The longest of what the processes ask for. For shared only.",
    )  # fmt: skip
    pool_log: Path | None = option(
        None, File(none="the stderr of the process that starts the pool"),
        "File to which the pool appends its log, and what its workers print.", (STREAMER, RAY),
        more="If it is renamed or removed, the pool begins a new one. That of the process that "
        "starts the pool counts. For shared only.",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class StreamerOptions(
    HostPoolOptions,
    CallerOptions,
    SharingOptions,
    WorkerOptions,
    FaultOptions,
    LengthOptions,
    BatchingOptions,
):
    """All options of ``Streamer``, and so of ``ThreadedStreamer``."""

    front = STREAMER


@dataclass(frozen=True, kw_only=True)
class ClusterOptions(Options):
    """What each worker asks a Ray cluster for."""

    num_gpus: float = option(
        1.0, Amount(), "GPUs of each worker; 0 for a model on the CPU, 0.5 for half of one.",
        (RAY, SERVE), flag="--ray-num-gpus",
        more="Ray gives each worker GPUs of its own, and the worker sees no others.",
    )  # fmt: skip
    num_cpus: float = option(
        1.0, Amount(), "Cores that each worker holds of its node.",
        (RAY, SERVE), flag="--ray-num-cpus",
        more="Ray counts them, and sets the threads of numeric libraries by them. It does not bind "
        "the worker to them.",
    )  # fmt: skip
    resources: Mapping[str, float] | None = option(
        None, Amounts(none="no others"), "Other resources that each worker holds, by name.",
        (RAY, SERVE), flag="--ray-resources",
        at={SERVE: {"more": "Such as disk=1,accelerator_type:A100=0.001."}},
    )  # fmt: skip
    runtime_env: Mapping[str, Any] | None = option(
        None, Arguments(none="that of this process", named=True),
        "What Ray brings to the node before the worker starts, such as packages.",
        (RAY, SERVE), flag="--ray-runtime-env", shown="nothing",
        more='{"working_dir": "."} brings the modules of the folder. It is Ray\'s runtime_env. It '
        "holds for the whole process if this connects to Ray; if the process is connected already, "
        "Ray takes no folders.",
        at={SERVE: {"more": """Such as '{"working_dir": "."}', for the modules of this folder."""}},
    )  # fmt: skip
    scheduling_strategy: Any = option(
        None, Strategy(none="that of Ray: fill a node, then the next"),
        'Which node a worker goes to: "SPREAD", or an object of Ray\'s, such as a '
        "PlacementGroupSchedulingStrategy.", (RAY, SERVE), flag="--ray-scheduling-strategy",
        at={
            SERVE: {
                "help": "Which node a worker goes to: DEFAULT fills a node and then the next, "
                "SPREAD takes different ones.",
                "shown": "DEFAULT",
            }
        },
    )  # fmt: skip
    address: str | None = option(
        None, Text(none="the cluster that runs here"), "Address of the Ray cluster.", _R,
        more="Without it: the cluster that this process is connected to, else the one that "
        "RAY_ADDRESS names or that runs on this machine, else a new one on this machine.",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RayStreamerOptions(ClusterOptions, StreamerOptions):
    """All options of ``RayStreamer``."""

    front = RAY


@dataclass(frozen=True, kw_only=True)
class BrokerOptions(Options):
    """What clients and worker hosts do with Redis."""

    redis_broker: Any = option(
        "localhost:6379", Broker(),
        "Address of Redis: host:port or a redis://, rediss:// or unix:// URL.",
        (REDIS_STREAMER, REDIS_WORKER, SERVE, WORKER),
        more="Or a redis.Redis client, whose connections are used.",
        flag="--redis", is_private=True,
        at={
            SERVE: {
                "default": None,
                "kind": Broker(none="no Redis"),
                "more": "The service then has no model of its own; worker hosts compute.",
                "shown": "the model is in worker processes of this service",
            },
            WORKER: {"more": ""},
        },
    )  # fmt: skip
    prefix: str = option(
        "", Prefix(), "Name that keeps the models on one Redis apart; the same on all sides.",
        (REDIS_STREAMER, REDIS_WORKER, SERVE, WORKER),
    )  # fmt: skip
    serializer: Literal["msgpack", "pickle"] = option(
        "msgpack", Choice(among=("msgpack", "pickle")),
        "Format of items and results in Redis; the same on all sides.",
        (REDIS_STREAMER, REDIS_WORKER),
        more='"msgpack" takes plain data, arrays and tensors. "pickle" takes any object, and '
        "needs a secret.",
    )  # fmt: skip
    secret: str | bytes | None = option(
        None, Secret(none="unsigned messages"),
        "Key that signs messages in Redis, at least 16 bytes; the same on all sides.",
        (REDIS_STREAMER, REDIS_WORKER, SERVE, WORKER),
        is_private=True,
        at={each: {"more": "Better in the environment than on the line."} for each in _WEB},
    )  # fmt: skip
    error_types: Sequence[type[BaseException]] = option(
        (), ErrorTypes(), "Exceptions of models that are raised here as themselves, besides the "
        "built-in ones.", (REDIS_STREAMER,),
        more='Others become ModelError, which names them. With "pickle" it is not needed.',
    )  # fmt: skip
    max_message_bytes: int = option(
        32 << 20, Count(least=1024), "Upper bound on the bytes of one call, or of its results.",
        (REDIS_STREAMER, REDIS_WORKER),
    )  # fmt: skip
    reply_ttl: float = option(
        120.0, Seconds(), "How long replies are kept for a client that cannot fetch them, in "
        "seconds.", (REDIS_STREAMER, REDIS_WORKER),
    )  # fmt: skip
    drain_timeout: float | None = option(
        60.0, Seconds(none="no limit"), "How long close waits for open calls that make no "
        "progress, in seconds.", (REDIS_STREAMER,),
        more="Then the open calls fail with StreamerClosed.",
    )  # fmt: skip
    claim_timeout: float = option(
        5.0, Seconds(), "Silence of a worker host after which other hosts take over its calls, in "
        "seconds.", (REDIS_WORKER,),
        more="They look every third of it, so it takes at most four thirds.",
    )  # fmt: skip
    model_name: str | None = option(
        None, Text(none="that of its class or function"), "Name by which the hosts of a prefix "
        "know that they serve the same model.", (REDIS_WORKER,),
    )  # fmt: skip
    allow_other_models: bool = option(
        False, Flag(), "Whether this host may serve beside hosts with another model.",
        (REDIS_WORKER, WORKER),
        more="For the time in which one model replaces another.",
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

    front = REDIS_STREAMER


@dataclass(frozen=True, kw_only=True)
class RedisWorkerOptions(BrokerOptions, StreamerOptions):
    """All options of ``RedisWorker``."""

    front = REDIS_WORKER


@dataclass(frozen=True, kw_only=True)
class PipelineOptions(Options):
    """Which model the command line serves."""

    model: str | None = option(
        None, Text(none="the model of this package"), "Folder, name on the Hugging Face hub, or "
        "module:Class of a ManagedModel.", _WEB,
        more="Without it a small text-infilling model is served, which comes with this package.",
    )  # fmt: skip
    task: str | None = option(
        None, Text(none="the model's own"), "Task of the Hugging Face pipeline.", _WEB,
        more="fill-mask, text-classification, token-classification, feature-extraction, "
        "text-generation, image-classification, zero-shot-classification, ...",
        shown="the model's own",
    )  # fmt: skip
    dtype: str = option(
        "auto", Choice(among=("auto", "float32", "float16", "bfloat16")),
        "Data type of the model's weights.", _WEB,
        more='On a GPU "auto" runs a checkpoint in float32 in float16, or in bfloat16 if the model '
        "needs its range. On a CPU, and for other checkpoints, it is the type of the checkpoint. "
        "float32 on a GPU uses TF32.",
    )  # fmt: skip
    attention: str | None = option(
        None, Choice(none="that of transformers", among=("sdpa", "flash_attention_2", "eager")),
        "How the model computes attention.", _WEB,
        more="flash_attention_2 needs the package flash-attn, a GPU, and float16 or bfloat16.",
        shown="what transformers prefers for the model",
    )  # fmt: skip
    quantization: str | None = option(
        None, Choice(none="none", among=(
            "bitsandbytes-8bit", "bitsandbytes-4bit", "torchao-int8", "torchao-float8",
            "quanto-int8", "quanto-int4",
        )),
        "How the model's weights are quantized while they are loaded.", _WEB,
        more="It saves device memory, and is often slower than float16. It needs the package "
        "that it is named after.",
        shown="as saved",
    )  # fmt: skip
    compile: bool = option(
        False, Flag(), "Compile the model with torch.compile.", _WEB,
        more="Batches are padded to a few shapes, and each is compiled before the worker is ready, "
        "which takes minutes. For text tasks other than generation and zero-shot, image "
        "classification and image features.",
    )  # fmt: skip
    max_batch_tokens: int | None = option(
        None, Count(none="no bound"), "Upper bound on the tokens of a forward pass, padding "
        "included.", _WEB,
        more="Batches are formed by four bytes for a token. A batch with more tokens is computed "
        "in parts, and a text beyond the bound alone. For text tasks other than generation.",
        shown="no bound",
    )  # fmt: skip
    max_batch_seconds: int | None = option(
        None, Count(none="60 on a CPU, 600 on a GPU"), "Upper bound on the seconds of sound of a "
        "forward pass.", _WEB,
        more="A batch with more is computed in parts. A longer sound is recognized in pieces, or "
        "gets 413 where the model cannot cut it, as in audio-classification. On a CPU a second "
        "takes 16 to 22 MB.",
        shown="60 on a CPU, 600 on a GPU",
    )  # fmt: skip
    revision: str | None = option(
        None, Text(none="main"), "Branch, tag or commit of a model on the Hugging Face hub.", _WEB,
        more="Also as NAME@REVISION. All workers load the commit that it means when the service "
        "starts.",
        shown="main",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class AddressOptions(Options):
    """Where a process listens, and how it logs."""

    host: str = option(
        "127.0.0.1", Text(), "Address to listen at; 0.0.0.0 for all of them.", _WEB,
        at={WORKER: {"help": "Address for --port; 0.0.0.0 for all of them."}},
    )  # fmt: skip
    port: int | None = option(
        8000, Count(least=0, most=65535), "Port to listen at; 0 takes a free one.", _WEB,
        at={
            WORKER: {
                "default": None,
                "kind": Count(least=0, most=65535, none="no port"),
                "help": "Port for GET of /health/live, /health/ready, /stats and /metrics; 0 "
                "takes a free one.",
                "variable": "SERVICE_STREAMER_WORKER_PORT",
                "shown": "do not listen",
            }
        },
    )  # fmt: skip
    log_format: Literal["text", "json"] = option(
        "text", Choice(among=("text", "json")), "Format of the log.", _WEB
    )


@dataclass(frozen=True, kw_only=True)
class WebOptions(Options):
    """How the web tier answers."""

    timeout: float = option(
        30.0, Seconds(), "Time limit of a request, in seconds; else 504, or 503 at once.", _S
    )
    api_keys: tuple[str, ...] = option(
        (), Text(), "Key that requests need for the model, metrics and statistics.", _S,
        more="May be given several times. Better in the environment than on the command line.",
        flag="--api-key", several=True, is_private=True, shown="no key is needed",
    )  # fmt: skip
    api_key_file: Path | None = option(
        None, File(none="no file", exists=True), "TOML file of API keys with scopes, limits and "
        "ends.", _S, more="It is read again when it changes. 'service-streamer key new' makes a "
        "key.", shown="no file",
    )  # fmt: skip
    ssl_certfile: Path | None = option(
        None, File(none="no TLS", exists=True), "PEM file with the certificate and its chain; the "
        "service then speaks TLS.", _S, more="It is read again when it changes.", shown="no TLS",
    )  # fmt: skip
    ssl_keyfile: Path | None = option(
        None, File(none="the certificate's file", exists=True), "PEM file with the key of the "
        "certificate.", _S, more="Its password, if it has one, is read from "
        "SERVICE_STREAMER_SSL_KEYFILE_PASSWORD.", shown="in the file of --ssl-certfile",
    )  # fmt: skip
    ssl_ca_certs: Path | None = option(
        None, File(none="no client certificates", exists=True), "PEM file of the authorities that "
        "clients' certificates must be from.", _S, more="Clients without one cannot connect.",
        shown="clients need no certificate",
    )  # fmt: skip
    cors_origins: tuple[str, ...] = option(
        (), Origin(), "Origin of web pages that may call the service from a browser, such as "
        "https://example.com; * for all.", _S, more="May be given several times.",
        flag="--cors-origin", several=True, shown="none",
    )  # fmt: skip
    access_log: bool = option(
        False, Flag(), "Log a line for each request, in the format of --log-format.", _S
    )
    priority_header: bytes = option(
        b"", Header(), "Header with the priority of a request, a whole number; the higher goes "
        "first.", _S, more="For a proxy in front to set.", shown="no header",
    )  # fmt: skip
    tenant_header: bytes = option(
        b"", Header(), "Header with the tenant of a request.", _S,
        more="Tenants share the model, so that none holds up the others. For a proxy in front to "
        "set. Without it each of several keys is a tenant.",
        shown="no header",
    )  # fmt: skip
    allowed_hosts: tuple[str, ...] = option(
        (), HostName(), "Host that requests may name, such as api.example.com or *.example.com.",
        _S, more="May be given several times. Health checks may name any host.",
        flag="--allowed-host", several=True, shown="any host",
    )  # fmt: skip
    max_body: int = option(
        16 << 20, Size(), "Upper bound on the body of a request, in bytes; else 413.", _S,
        shown="16M",
    )  # fmt: skip
    max_pixels: int = option(
        64_000_000, Count(), "Upper bound on the decoded pixels of all images of a request; else "
        "413.", _S, more="One image has at most 64,000,000.",
    )  # fmt: skip
    max_audio_seconds: float = option(
        600.0, Seconds(), "Upper bound on the length of all sounds of a request, in seconds; else "
        "413.", _S,
        more="One sound has at most 600, or --max-batch-seconds if the model cannot cut it.",
    )  # fmt: skip
    max_characters: int = option(
        1_000_000, Count(), "Upper bound on the characters of all texts of a request; else 413.",
        _S, more="A text counts once for each candidate label.",
    )  # fmt: skip
    max_tokens: int = option(
        16_384, Count(), "Upper bound on the tokens that a request may generate; else 413.", _S,
        more="Tokens of an answer × answers × prompts. An answer counts 256 if max_new_tokens is "
        "left out.",
    )  # fmt: skip
    write_timeout: float = option(
        30.0, Seconds(), "How long a client may leave an answer unread, in seconds.", _S,
        more="Then its connection is closed.",
    )  # fmt: skip
    max_unread: int = option(
        256 << 20, Size(), "Upper bound on the answers that all clients together leave unread, in "
        "bytes.", _S, more="Beyond it the connection of the slowest is closed.", shown="256M",
    )  # fmt: skip
    max_answers: int = option(
        256 << 20, Size(), "Upper bound on the memory of all large answers that are computed or "
        "sent, in bytes; else 413 or 503.", _S, more="A number has 4, and about 20 in "
        "JSON.", shown="256M",
    )  # fmt: skip
    opentelemetry: bool = option(
        False, Flag(), "Send spans of requests and batches to the collector of "
        "OTEL_EXPORTER_OTLP_ENDPOINT.", _S,
    )  # fmt: skip
    debug: bool = option(
        False, Flag(), "Show in answers what went wrong inside; not for the public.", _S
    )


@dataclass(frozen=True, kw_only=True)
class ServeOptions(
    StreamerOptions, ClusterOptions, BrokerOptions, WebOptions, AddressOptions, PipelineOptions
):
    """All options of ``service-streamer serve``."""

    front = SERVE

    ray: str | None = option(
        None, RayAddress(none="no Ray"),
        "Run the workers on a Ray cluster: host:port, auto for the cluster that this machine is a "
        "node of, local for a new one.", _S,
        more="Without an address: the cluster of RAY_ADDRESS or of this machine, else a new one.",
        shown="the workers are processes of this machine",
    )  # fmt: skip

    grpc_port: int | None = option(
        None, Count(least=0, most=65535, none="no gRPC"),
        "Port for gRPC, the Open Inference Protocol; 0 takes a free one.", _S,
        more="At the address of --host.", shown="no gRPC",
    )  # fmt: skip

    web_workers: int | Literal["auto"] = option(
        1, Count(auto=True), "Number of processes that answer HTTP.", _S,
        more="They share the workers. auto chooses by the cores of this machine.",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class WorkerCommandOptions(StreamerOptions, BrokerOptions, AddressOptions, PipelineOptions):
    """All options of ``service-streamer worker``."""

    front = WORKER


@dataclass(frozen=True, kw_only=True)
class SimulateOptions(BatchingOptions, WorkerOptions):
    """All options of ``service-streamer simulate``."""

    front = SIMULATE

    base: float = option(5e-3, _TIME, "Time that any batch takes.", _M, shown="5ms")
    per_item: float = option(1e-4, _TIME, "Time that each item adds.", _M, shown="100us")
    per_unit: float = option(
        0.0, _TIME, "Time that each unit of length adds.", _M,
        more="Each item counts as if it were the longest of its batch.",
    )  # fmt: skip
    quadratic: float = option(
        0.0, _TIME, "Time that the square of the longest length adds for each item.", _M
    )
    start_duration: float = option(
        5.0, _TIME, "Time that a worker takes to load its model, of a range of workers.", _M,
        shown="5s",
    )  # fmt: skip
    closed_loop: int | None = option(
        None, Count(none="no"), "Number of callers that each wait for their answer.", _M,
        shown="",
    )  # fmt: skip
    think_time: float = option(
        0.0, _TIME, "Time that callers of --closed-loop wait before each call.", _M
    )
    rate: float | None = option(
        None, Number(none="no"), "Calls a second that arrive at random; also beside --bursts.", _M
    )
    bursts: tuple[int, float] | None = option(
        None, BurstText(none="no"), "Calls that arrive at once, again and again: 40/500ms.", _M
    )
    load: tuple[tuple[float, float], ...] | None = option(
        None, LoadText(none="no"), "Calls that arrive at random, in phases: a multiple of what one "
        "worker computes, and a duration each, as 0.2:60s,3:120s,0.2:180s.", _M,
    )  # fmt: skip
    trace: Path | None = option(
        None, File(none="no", exists=True), "File of calls that a streamer with trace= wrote.",
        _M,
    )  # fmt: skip
    speed: float = option(1.0, Number(), "Factor by which the trace runs faster.", _M)
    items: int = option(1, Count(), "Items of each call, if the load is not a trace.", _M)
    lengths: tuple[float, float] | None = option(
        None, LengthText(none="no"), "Mean length of the items, or mean and spread such as "
        "25:0.6.", _M,
    )  # fmt: skip
    requests: int | None = option(
        None, Count(none="no"), "Number of calls after which the simulation ends.", _M,
        shown="20000, or the end of the trace or of --seconds",
    )  # fmt: skip
    seconds: float | None = option(
        None, Seconds(none="no"), "Simulated time after which the simulation ends.", _M
    )
    seed: int = option(0, Count(least=None), "Seed of all that is random.", _M)
    fixed_wait: float | None = option(
        None, Seconds(none="no", zero=True), "Fixed wait for batches of --batch-size, to compare "
        "with.", _M,
    )  # fmt: skip
    sweep: bool = option(False, Flag(), "Try loads from 0.1 to 1.2 of what can be computed.", _M)
    plot: Path | None = option(None, File(none="no"), "SVG file with the latencies of a sweep.", _M)


#: The object of each front.
GROUPS: dict[str, type[Options]] = {
    THREADED: StreamerOptions,
    STREAMER: StreamerOptions,
    RAY: RayStreamerOptions,
    REDIS_STREAMER: RedisStreamerOptions,
    REDIS_WORKER: RedisWorkerOptions,
    SERVE: ServeOptions,
    WORKER: WorkerCommandOptions,
    SIMULATE: SimulateOptions,
}
