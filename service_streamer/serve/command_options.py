"""The options of the commands ``serve``, ``worker`` and ``simulate``.

They are those of the library that make sense there, and their own. An option that means something
else on the command line is declared again. ``cli`` says how the values are written.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..options import kinds
from ..options.checks import IMPORT_STRING, Device, Workers
from ..options.kinds import Kind, Options, changed, option
from ..options.table import (
    BatchingOptions,
    HangOptions,
    LengthOptions,
    PendingOptions,
    PlacementOptions,
    RedisOptions,
    RedisWorkerOptions,
    ResourceOptions,
    ScaleOptions,
    SharingOptions,
)
from .http.web_options import WebOptions

#: What --ray means without a value.
ANY_CLUSTER = "any"

_PORT = kinds.count(0, 65535)
_RAY_WORDS = "host:port, auto, local or any"
_RAY = re.compile(r"any|auto|local|[^:/\s]+:\d+|\[[0-9a-f:.]+\]:\d+")


def _ray_address(value: Any) -> str:
    """Where a Ray cluster is, as the command line has it."""
    if isinstance(value, str) and _RAY.fullmatch(value):
        return value
    if isinstance(value, str) and value.startswith("ray://"):
        raise ValueError(
            f"must not be {value}, since batches do not go through the Ray Client; run this on "
            "a node of the cluster, with host:port or auto"
        )
    is_model = isinstance(value, str) and IMPORT_STRING.fullmatch(value) is not None
    hint = "; write MODEL before --ray" if is_model else ""
    raise ValueError(f"must be {_RAY_WORDS}; not {value!r}{hint}")


@dataclass(frozen=True, kw_only=True)
class PipelineOptions(Options):
    """Which model the command line serves."""

    model: str | None = option(
        None, kinds.text().or_none("the model of this package"),
        "Folder, name on the Hugging Face hub, or module:Class of a ManagedModel.",
        "Without it a small text-infilling model is served, which comes with this package.",
    )  # fmt: skip
    task: str | None = option(
        None, kinds.text().or_none("the model's own"), "Task of the Hugging Face pipeline.",
        "fill-mask, text-classification, token-classification, feature-extraction, "
        "text-generation, image-classification, zero-shot-classification, ...",
        shown="the model's own",
    )  # fmt: skip
    dtype: str = option(
        "auto", kinds.choice("auto", "float32", "float16", "bfloat16"),
        "Data type of the model's weights.",
        'On a GPU "auto" runs a checkpoint in float32 in float16, or in bfloat16 if the model '
        "needs its range. On a CPU, and for other checkpoints, it is the type of the checkpoint. "
        "float32 on a GPU uses TF32.",
    )  # fmt: skip
    attention: str | None = option(
        None, kinds.choice("sdpa", "flash_attention_2", "eager").or_none("that of transformers"),
        "How the model computes attention.",
        "flash_attention_2 needs the package flash-attn, a GPU, and float16 or bfloat16.",
        shown="what transformers prefers for the model",
    )  # fmt: skip
    quantization: str | None = option(
        None, kinds.choice(
            "bitsandbytes-8bit", "bitsandbytes-4bit", "torchao-int8", "torchao-float8",
            "quanto-int8", "quanto-int4",
        ).or_none("none"),
        "How the model's weights are quantized while they are loaded.",
        "It saves device memory, and is often slower than float16. It needs the package that it "
        "is named after.",
        shown="as saved",
    )  # fmt: skip
    compile: bool = option(
        False, kinds.FLAG, "Compile the model with torch.compile.",
        "Batches are padded to a few shapes, and each is compiled before the worker is ready, "
        "which takes minutes. For text tasks other than generation and zero-shot, image "
        "classification and image features.",
    )  # fmt: skip
    max_batch_tokens: int | None = option(
        None, kinds.count().or_none("no bound"),
        "Upper bound on the tokens of a forward pass, padding included.",
        "Batches are formed by four bytes for a token. A batch with more tokens is computed in "
        "parts, and a text beyond the bound alone. For text tasks other than generation.",
        shown="no bound",
    )  # fmt: skip
    max_batch_seconds: int | None = option(
        None, kinds.count().or_none("60 on a CPU, 600 on a GPU"),
        "Upper bound on the seconds of sound of a forward pass.",
        "A batch with more is computed in parts. A longer sound is recognized in pieces, or gets "
        "413 where the model cannot cut it, as in audio-classification. On a CPU a second takes "
        "16 to 22 MB.",
        shown="60 on a CPU, 600 on a GPU",
    )  # fmt: skip
    revision: str | None = option(
        None, kinds.text().or_none("main"),
        "Branch, tag or commit of a model on the Hugging Face hub.",
        "Also as NAME@REVISION. All workers load the commit that it means when the service "
        "starts.",
        shown="main",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class AddressOptions(Options):
    """Where a process listens, and how it logs."""

    host: str = option("127.0.0.1", kinds.text(), "Address to listen at; 0.0.0.0 for all of them.")
    port: int | None = option(
        8000, _PORT, "Port to listen at; 0 takes a free one.",
    )  # fmt: skip
    log_format: Literal["text", "json"] = option(
        "text", kinds.choice("text", "json"), "Format of the log.",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ModelCommandOptions(
    PlacementOptions,
    ScaleOptions,
    HangOptions,
    LengthOptions,
    BatchingOptions,
    RedisOptions,
    AddressOptions,
    PipelineOptions,
):
    """What ``serve`` and ``worker`` have in common."""

    max_batch_cost: float | None = changed(
        BatchingOptions, "max_batch_cost", more="Pipelines count bytes of text."
    )
    length: Callable[[Any], float] | str | None = changed(
        LengthOptions, "length",
        help="Where to import the function that returns the cost of an input, such as "
        "my_module:MyModel.length.",
        more="Inputs of similar cost share a batch. For a model of your own.",
    )  # fmt: skip
    cuda_devices: Sequence[Device] | Literal["auto"] | None = changed(
        PlacementOptions, "cuda_devices", default="auto",
        more="Such as 0,1,2,3. A worker whose GPU is missing does not start.",
        shown="all visible GPUs in turn; a single worker sees all",
    )  # fmt: skip
    devices_per_worker: int = changed(
        PlacementOptions, "devices_per_worker",
        more="For a model that is larger than one GPU, which is spread over them by the package "
        "accelerate. It must divide the number of devices.",
    )  # fmt: skip
    preprocess_workers: int = changed(
        PlacementOptions, "preprocess_workers",
        more="For images, sounds, and models of your own with stages. Texts are tokenized in the "
        "worker.",
    )  # fmt: skip
    secret: str | bytes | None = changed(
        RedisOptions, "secret", more="Better in the environment than on the line."
    )


@dataclass(frozen=True, kw_only=True)
class ServeOptions(
    SharingOptions, PendingOptions, ResourceOptions, WebOptions, ModelCommandOptions
):
    """All options of ``service-streamer serve``."""

    worker_num: Workers = changed(
        ScaleOptions, "worker_num", more="With 1:16 workers are started and ended by the load."
    )
    max_pending: int | None = changed(
        PendingOptions, "max_pending",
        help="Upper bound on the inputs that wait; requests beyond it get 503 at once.",
        more="", shown="16 batches for each worker, at least 256",
    )  # fmt: skip
    redis_broker: Any = changed(
        RedisOptions, "redis_broker", default=None, kind=kinds.BROKER.or_none("no Redis"),
        more="The service then has no model of its own; worker hosts compute.",
        shown="the model is in worker processes of this service",
    )  # fmt: skip
    resources: Mapping[str, float] | None = changed(
        ResourceOptions, "resources", more="Such as disk=1,accelerator_type:A100=0.001."
    )
    runtime_env: Mapping[str, Any] | None = changed(
        ResourceOptions, "runtime_env",
        more="""Such as '{"working_dir": "."}', for the modules of this folder.""",
    )  # fmt: skip
    scheduling_strategy: Any = changed(
        ResourceOptions, "scheduling_strategy",
        help="Which node a worker goes to: DEFAULT fills a node and then the next, SPREAD takes "
        "different ones.",
        shown="DEFAULT",
    )  # fmt: skip
    ray: str | None = option(
        None, Kind("ray", _RAY_WORDS, normalize=_ray_address, none="no Ray"),
        "Run the workers on a Ray cluster: host:port, auto for the cluster that this machine is "
        "a node of, local for a new one.",
        "Without an address: the cluster of RAY_ADDRESS or of this machine, else a new one.",
        shown="the workers are processes of this machine",
    )  # fmt: skip
    grpc_port: int | None = option(
        None, _PORT.or_none("no gRPC"),
        "Port for gRPC, the Open Inference Protocol; 0 takes a free one.",
        "At the address of --host.",
        shown="no gRPC",
    )  # fmt: skip
    web_workers: int | Literal["auto"] = option(
        1, kinds.count().or_auto(), "Number of processes that answer HTTP.",
        "They share the workers. auto chooses by the cores of this machine.",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class WorkerCommandOptions(ModelCommandOptions):
    """All options of ``service-streamer worker``."""

    host: str = changed(AddressOptions, "host", help="Address for --port; 0.0.0.0 for all of them.")
    port: int | None = changed(
        AddressOptions, "port", default=None, kind=_PORT.or_none("no port"),
        help="Port for GET of /health/live, /health/ready, /stats and /metrics; 0 takes a free "
        "one.",
        shown="do not listen",
    )  # fmt: skip
    redis_broker: Any = changed(RedisOptions, "redis_broker", more="")
    worker_num: int = changed(RedisWorkerOptions, "worker_num")


_BURSTS = Kind(
    "bursts", "a number of calls and seconds between bursts, such as 40/500ms", none="no"
)
_MEAN_LENGTH = Kind("mean", "a mean length, such as 25, or with its spread 25:0.6", none="no")
_PHASES = Kind("phases", "loads above 0 and how long each lasts, such as 0.2:60s,3:120s", none="no")


@dataclass(frozen=True, kw_only=True)
class SimulateOptions(ScaleOptions, BatchingOptions):
    """All options of ``service-streamer simulate``."""

    worker_num: Workers = changed(
        ScaleOptions, "worker_num", more="With 1:16 workers are started and ended by the load."
    )
    base: float = option(5e-3, kinds.seconds(zero=True), "Time that any batch takes.", shown="5ms")
    per_item: float = option(
        1e-4, kinds.seconds(zero=True), "Time that each item adds.", shown="100us"
    )
    per_unit: float = option(
        0.0, kinds.seconds(zero=True), "Time that each unit of length adds.",
        "Each item counts as if it were the longest of its batch.",
    )  # fmt: skip
    quadratic: float = option(
        0.0, kinds.seconds(zero=True),
        "Time that the square of the longest length adds for each item.",
    )  # fmt: skip
    start_duration: float = option(
        5.0, kinds.seconds(zero=True),
        "Time that a worker takes to load its model, of a range of workers.",
        shown="5s",
    )  # fmt: skip
    closed_loop: int | None = option(
        None, kinds.count().or_none("no"), "Number of callers that each wait for their answer.",
    )  # fmt: skip
    think_time: float = option(
        0.0, kinds.seconds(zero=True), "Time that callers of --closed-loop wait before each call.",
    )  # fmt: skip
    rate: float | None = option(
        None, kinds.number().or_none("no"),
        "Calls a second that arrive at random; also beside --bursts.",
    )  # fmt: skip
    bursts: tuple[int, float] | None = option(
        None, _BURSTS, "Calls that arrive at once, again and again: 40/500ms.",
    )  # fmt: skip
    load: tuple[tuple[float, float], ...] | None = option(
        None, _PHASES,
        "Calls that arrive at random, in phases: a multiple of what one worker computes, and a "
        "duration each, as 0.2:60s,3:120s,0.2:180s.",
    )  # fmt: skip
    trace: Path | None = option(
        None, kinds.file(exists=True).or_none("no"),
        "File of calls that a streamer with trace= wrote.",
    )  # fmt: skip
    speed: float = option(1.0, kinds.number(), "Factor by which the trace runs faster.")
    items: int = option(1, kinds.count(), "Items of each call, if the load is not a trace.")
    lengths: tuple[float, float] | None = option(
        None, _MEAN_LENGTH, "Mean length of the items, or mean and spread such as 25:0.6.",
    )  # fmt: skip
    requests: int | None = option(
        None, kinds.count().or_none("no"), "Number of calls after which the simulation ends.",
        shown="20000, or the end of the trace or of --seconds",
    )  # fmt: skip
    seconds: float | None = option(
        None, kinds.seconds().or_none("no"), "Simulated time after which the simulation ends.",
    )  # fmt: skip
    seed: int = option(0, kinds.count(least=-math.inf), "Seed of all that is random.")
    fixed_wait: float | None = option(
        None, kinds.seconds(zero=True).or_none("no"),
        "Fixed wait for batches of --batch-size, to compare with.",
    )  # fmt: skip
    sweep: bool = option(False, kinds.FLAG, "Try loads from 0.1 to 1.2 of what can be computed.")
    plot: Path | None = option(
        None, kinds.file().or_none("no"), "SVG file with the latencies of a sweep."
    )
