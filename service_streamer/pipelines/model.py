"""A transformers pipeline as a ManagedModel: many requests, few forward passes."""

from __future__ import annotations

import base64
import io
import math
import os
import struct
import wave
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from ..errors import InvalidInput
from ..managed_model import ManagedModel
from ..workers.batch_ceiling import is_out_of_memory
from .generation import Generator, PipelineGenerator
from .handlers import Describer, Handler
from .hub import name_and_revision, remember, resolve
from .inputs import AudioPredictor, ImagePredictor
from .loading import load_pipeline, locate_model, read_json, shown_name
from .requests import Request
from .sizes import item_length
from .tasks import TASKS, check_parameters, parse_item
from .texts import SentenceEmbedder, TextPredictor
from .weights import Loading

__all__ = ["PipelineModel", "description", "example_of"]


class Group(NamedTuple):
    """Requests of a batch that are computed together."""

    handler: Handler
    requests: list[Request]
    batch: Any


class PipelineModel(ManagedModel):
    """Serves a transformers model, from a folder or from the hub.

    Items are ``{"do": ..., "inputs": ..., "parameters": {...}}``; anything else is an input
    without parameters. Operations (``do``):

    - ``"predict"``: the pipeline's result for the input, with these parameters;
    - ``"generate"`` (text-generation): ``[{"text", "finish_reason", "prompt_tokens",
      "completion_tokens"}, ...]``, one per requested sequence;
    - ``"embed"`` (feature-extraction): ``{"embedding", "tokens"}``, a vector of length 1;
    - ``"describe"``: what ``describe`` returns, for web services of earlier versions.

    Items with the same operation and parameters are computed together. All items are checked
    before anything is computed, and ``InvalidInput`` names the first invalid one. Paths and
    addresses in items are never opened.
    """

    #: Length of items, for the web process, which has neither the model nor its task.
    length = staticmethod(item_length)

    def init_model(
        self,
        model: str | os.PathLike[str] | None = None,
        task: str | None = None,
        dtype: str = "auto",
        batch_size: int = 64,
        revision: str | None = None,
        commit: str | None = None,
        *,
        attention: str | None = None,
        quantization: str | None = None,
        devices: int = 1,
    ) -> None:
        """Load the model, and run each of its operations once.

        Args:
            model: a folder, or a hub name, optionally "name@revision"; None is the text infilling
                model of this package.
            task: the task; None asks the hub, or infers it from the model's class.
            dtype: "float32", "float16", "bfloat16" or "auto": on a GPU float16 for a checkpoint in
                float32, else as saved (see ``choose_precision``).
            batch_size: the streamer's batch size; a GPU is warmed up with such a batch.
            revision: branch, tag or commit on the hub. A branch may move between restarts of a
                worker; a commit never does.
            commit: the commit of ``revision``, if known; then it is not looked up.
            attention: "sdpa", "flash_attention_2" or "eager"; None for what transformers prefers.
            quantization: such as "bitsandbytes-8bit" (see ``QUANTIZATIONS``); None for none.
            devices: number of GPUs that the model is spread over; the worker must see as many.

        Raises:
            FileNotFoundError: there is no such model, or a file of it is missing.
            ImportError: a package that the task or an argument needs is missing.
            RuntimeError: the model was loaded but does not run; or torch cannot use the GPU.
            ValueError: the task is unknown or unsupported by the model; or an argument is wrong,
                or unsupported by the model or the device.
        """
        source, hub = locate_model(model), None
        if not os.path.isdir(source):
            hub = resolve(*name_and_revision(source, revision), commit)
            source = hub.name
        elif revision is not None:
            raise ValueError(f"revision={revision!r} is for a model on the hub, not for a folder")
        loading = Loading(dtype, attention, quantization, self._device(), devices)
        self.model, precision = load_pipeline(source, task, loading, hub)
        self.task: str = self.model.task
        self._obstacle = ""
        self.handlers = self._handlers(partial(read_json, source, hub=hub), batch_size)
        self.description = description(self.model, shown_name(source), list(self.handlers))
        self.description["max_tokens"] = min(
            (handler.limit for handler in self.handlers.values() if handler.limit), default=None
        )
        self.description |= {
            "revision": None if hub is None else hub.commit,
            "dtype": precision.dtype,
            "dtype_reason": precision.reason,
            "quantization": quantization,
        }
        self._describer = Describer(self.description)
        if hub is not None:
            remember(hub)
        self._warm_up(batch_size)

    def describe(self) -> dict[str, Any]:
        return self.description

    def preprocess(self, items: list[Any]) -> list[Group]:
        """Check and decode a batch's items, and tokenize its texts.

        Raises:
            InvalidInput: an item is invalid; nothing was computed.
        """
        with _portable_errors():
            requests = self._checked(items)
            groups: dict[Hashable, list[Request]] = {}
            for request in requests:
                groups.setdefault(request.key, []).append(request)
            together = ((self._handler(each[0]), each) for each in groups.values())
            return [Group(handler, each, handler.collate(each)) for handler, each in together]

    def forward(self, batch: list[Group]) -> list[tuple[Group, Any]]:
        """Compute each group; its outputs may be on the GPU still."""
        with _portable_errors():
            # Without its inputs: the GPU's memory would be full of them.
            return [(each._replace(batch=None), each.handler.forward(each.batch)) for each in batch]

    def postprocess(self, outputs: list[tuple[Group, Any]]) -> list[Any]:
        """One result per item, in order."""
        with _portable_errors():
            results: list[Any] = [None] * sum(len(group.requests) for group, _ in outputs)
            for group, output in outputs:
                finished = group.handler.finish(group.requests, output)
                for request, result in zip(group.requests, finished, strict=True):
                    results[request.position] = result
            self.padding = _padding([group.requests for group, _ in outputs])
            return results

    def _checked(self, items: list[Any]) -> list[Request]:
        """The items as requests. Raises InvalidInput, of the first invalid item."""
        requests: list[Request] = []
        wrong: InvalidInput | None = None
        for position, item in enumerate(items):
            try:
                requests.append(self._prepared(position, item))
            except InvalidInput as error:
                wrong = error  # unless one before it has tokens that are invalid
                break
        together: dict[str, list[Request]] = {}
        for request in requests:
            together.setdefault(request.do, []).append(request)
        for each in together.values():
            self._handler(each[0]).encode(each)
        wrong = next((each.error for each in requests if each.error is not None), wrong)
        if wrong is not None:
            raise wrong
        return requests

    def _prepared(self, position: int, item: object) -> Request:
        do, inputs, parameters = parse_item(item)
        if do != "describe":
            if do not in self.handlers:
                raise InvalidInput(
                    f"do: this model, of the task {self.task}, cannot {do[:60]!a}; it can "
                    + " and ".join(self.handlers)
                    + self._obstacle
                )
            parameters = check_parameters(self.task, do, parameters)
        request = Request(do, inputs, parameters, position)
        self._handler(request).prepare(request)
        return request

    def _handler(self, request: Request) -> Handler:
        return self._describer if request.do == "describe" else self.handlers[request.do]

    def _handlers(self, read_json: Callable[[str], Any], batch_size: int) -> dict[str, Handler]:
        takes = TASKS[self.task].takes
        if takes == "image":
            return {"predict": ImagePredictor(self.model)}
        if takes == "audio":
            return {"predict": AudioPredictor(self.model)}
        if self.task == "text-generation":
            return {"predict": PipelineGenerator(self.model), "generate": Generator(self.model)}
        predictor = TextPredictor(self.model, self.task, batch_size)
        handlers: dict[str, Handler] = {"predict": predictor}
        if self.task == "feature-extraction":
            embedder = SentenceEmbedder(predictor, read_json)
            if embedder.obstacle:
                self._obstacle = f"; it cannot embed, since {embedder.obstacle}"
            else:
                handlers["embed"] = embedder
        return handlers

    def _device(self) -> str:
        """The device of this worker. In a thread, ``"cpu"`` does not hide the GPUs from torch.

        Raises:
            RuntimeError: torch cannot use the requested GPU.
        """
        try:
            import torch
        except ImportError:  # load_pipeline says it better
            return "cpu"
        if str(self.gpu_id) == "cpu":
            return "cpu"
        if torch.cuda.is_available():
            return "cuda:0"
        if self.gpu_id is None:
            return "cpu"
        backend: Any = torch.backends.cuda
        why = (
            "perhaps its driver is too old, or the device is lost; see nvidia-smi"
            if backend.is_built()
            else "it is built for the CPU; install a build for your GPU"
        )
        raise RuntimeError(
            f"device {self.gpu_id} was requested, but torch {torch.__version__} cannot use it: "
            f'{why}, or name "cpu"'
        )

    def _warm_up(self, batch_size: int) -> None:
        """Run each operation once: the first run allocates memory and chooses kernels."""
        sizes = {1} if self.model.device.type == "cpu" else {1, batch_size}
        for do in self.handlers:
            item = {"do": do, **example_of(self.model)}
            for size in sorted(sizes):
                try:
                    self.predict([item] * size)
                except Exception as error:
                    if size > 1 and is_out_of_memory(error):
                        continue  # the worker makes such batches smaller
                    raise RuntimeError(
                        f"the model was loaded, but its first {do!r} of {size} failed: "
                        f"{type(error).__name__}: {error}"
                    ) from error


def _padding(groups: list[list[Request]]) -> float | None:
    """Share of padding among the tokens: each group is padded to its longest text."""
    computed = sum(len(group) * max(each.tokens for each in group) for group in groups)
    tokens = sum(each.tokens for group in groups for each in group)
    return 1 - tokens / computed if computed else None


@contextmanager
def _portable_errors() -> Iterator[None]:
    """Replace errors by those that the web process can load."""
    try:
        yield
    except Exception as error:
        known = _portable(error)
        if known is error:
            raise
        raise known from error


def _portable(error: Exception) -> Exception:
    """The error, or a substitute that the web process can load without transformers."""
    if is_out_of_memory(error):
        return error  # the worker makes the batch smaller
    module = type(error).__module__.partition(".")[0]
    if module in ("builtins", "service_streamer"):
        return error
    if type(error).__name__ == "PipelineException":  # of an input that a pipeline refuses
        return InvalidInput(f"inputs: {error}")
    return RuntimeError(f"{type(error).__name__}: {error}")


_LABELLED = frozenset(
    (
        "audio-classification", "image-classification", "object-detection", "text-classification",
        "token-classification",
    )
)  # fmt: skip

_EXAMPLES = {
    "feature-extraction": "A sentence to find others like it.",
    "text-classification": "I have never enjoyed a rainy day as much as this one.",
    "text-generation": "Once upon a time",
    "token-classification": "Ada Lovelace lived in London.",
    "zero-shot-classification": "The match ended two to one.",
}

#: For tasks that require labels.
_LABELS = ["sports", "politics"]


def description(pipeline: Any, name: str, operations: list[str]) -> dict[str, Any]:
    """The model's description, without the limits.

    Args:
        pipeline: a transformers pipeline.
        name: the model's name for users.
        operations: supported operations.
    """
    task, model = pipeline.task, pipeline.model
    labels = getattr(model.config, "id2label", None) if task in _LABELLED else None
    return {
        "task": task,
        "model": name,
        "mask_token": pipeline.tokenizer.mask_token if task == "fill-mask" else None,
        "operations": operations,
        "takes_parameters": any(TASKS[task].parameters_of(do) for do in operations),
        "labels": [str(labels[at]) for at in sorted(labels)] if labels else None,
        "candidate_labels_required": "candidate_labels" in TASKS[task].parameters,
        "max_tokens": None,
        "device": str(pipeline.device),
        "attention": getattr(model.config, "_attn_implementation", None),
        "example": example_of(pipeline)["inputs"],
    }


def example_of(pipeline: Any) -> dict[str, Any]:
    """Cheap inputs and parameters that every model of the task accepts."""
    task = pipeline.task
    parameters: dict[str, Any] = {}
    inputs: str
    if TASKS[task].takes == "image":
        inputs = _example_image()
    elif TASKS[task].takes == "audio":
        inputs = _example_sound(pipeline.feature_extractor.sampling_rate)
    elif task == "fill-mask":
        inputs = f"Happy birthday to {pipeline.tokenizer.mask_token}."
    else:
        inputs = _EXAMPLES[task]
    if "candidate_labels" in TASKS[task].parameters:
        parameters["candidate_labels"] = _LABELS
    if task == "text-generation":
        parameters |= {"max_new_tokens": 2, "do_sample": False}
    return {"inputs": inputs, "parameters": parameters}


def _example_image() -> str:
    """A little picture: a gradient from blue to orange."""
    from PIL import Image  # type: ignore[import-not-found, unused-ignore]

    image = Image.new("RGB", (64, 64))
    image.putdata([(4 * x, 2 * (x + y), 255 - 4 * x) for y in range(64) for x in range(64)])
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _example_sound(rate: int) -> str:
    """A tenth of a second of the concert pitch."""
    file = io.BytesIO()
    samples = [round(8000 * math.sin(at * 880 * math.pi / rate)) for at in range(rate // 10)]
    with wave.open(file, "wb") as sound:
        sound.setparams((1, 2, rate, 0, "NONE", ""))
        sound.writeframes(struct.pack(f"<{len(samples)}h", *samples))
    return "data:audio/wav;base64," + base64.b64encode(file.getvalue()).decode()
