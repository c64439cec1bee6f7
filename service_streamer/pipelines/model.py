"""A pipeline of transformers as a model that is served: many requests, few forward passes."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import Any, Protocol

from ..errors import InvalidInput
from ..managed_model import ManagedModel
from ..workers.oom import is_out_of_memory
from .describing import description, example_of
from .embedding import SentenceEmbedder
from .generation import Generator, PipelineGenerator
from .hub import name_and_revision, remember, resolve
from .lengths import item_length
from .loading import load_pipeline, locate_model, read_json, shown_name
from .media import AudioPredictor, ImagePredictor
from .requests import Request, plain
from .tasks import TASKS, check_parameters, parse_item
from .texts import TextPredictor

__all__ = ["PipelineModel"]


class Handler(Protocol):
    """Computes the requests of one operation."""

    limit: int | None

    def prepare(self, request: Request) -> None:
        """Check a request, and set its key. Raises InvalidInput."""

    def run(self, requests: list[Request]) -> list[Any]:
        """Compute requests of the same key; one result each."""


class PipelineModel(ManagedModel):
    """Serves a model of transformers, from a folder or from the hub.

    Items are ``{"do": ..., "inputs": ..., "parameters": {...}}``; whatever else is an input
    without parameters. What they do:

    - ``"predict"``: what the pipeline answers to the single input, with these parameters;
    - ``"generate"`` (text-generation): ``[{"text", "finish_reason", "prompt_tokens",
      "completion_tokens"}, ...]``, one for each sequence that was asked for;
    - ``"embed"`` (feature-extraction): ``{"embedding", "tokens"}``, a vector of length 1;
    - ``"describe"``: what ``describe`` returns, for web services of earlier versions.

    Items with the same operation and parameters are computed together, whatever else is in the
    batch. All items are checked before anything is computed, and ``InvalidInput`` names the first
    that is bad. Nothing that an item names is opened or fetched.
    """

    #: What items cost, for the web process, which knows neither the model nor its task.
    length = staticmethod(item_length)

    def init_model(
        self,
        model: str | os.PathLike[str] | None = None,
        task: str | None = None,
        dtype: str = "auto",
        batch_size: int = 64,
        revision: str | None = None,
        commit: str | None = None,
    ) -> None:
        """Load the model, and run each of its operations once.

        Args:
            model: a folder, or a name on the hub, perhaps with its revision: "name@revision"; None
                is the text infilling model that is part of this package.
            task: what to do with it; None asks the hub, or goes by the model's class.
            dtype: "auto" (as it was saved), "float32", "float16" or "bfloat16".
            batch_size: of the streamer: a GPU is warmed up with such a batch.
            revision: of a model on the hub: a branch, a tag or a commit. A branch may have moved
                when a worker is started again; a commit is always the same.
            commit: the commit that ``revision`` means, if that is known; then it is not looked up.

        Raises:
            FileNotFoundError: there is no such model, or a file of it is missing.
            ImportError: a package that the task needs is missing.
            RuntimeError: the model was loaded, but cannot be run; or it should run on a GPU that
                torch cannot use.
            ValueError: the task is unknown, or none that the model can do; or a wrong dtype.
        """
        source, hub = locate_model(model), None
        if not os.path.isdir(source):
            hub = resolve(*name_and_revision(source, revision), commit)
            source = hub.name
        elif revision is not None:
            raise ValueError(f"revision={revision!r} is for a model on the hub, not for a folder")
        self.model = load_pipeline(source, task, dtype, self._device(), hub)
        self.task: str = self.model.task
        self._obstacle = ""
        self.handlers = self._handlers(partial(read_json, source, hub=hub), batch_size)
        self.description = description(self.model, shown_name(source), list(self.handlers))
        self.description["max_tokens"] = min(
            (handler.limit for handler in self.handlers.values() if handler.limit), default=None
        )
        self.description["revision"] = None if hub is None else hub.commit
        if hub is not None:
            remember(hub)
        self._warm_up(batch_size)

    def describe(self) -> dict[str, Any]:
        return self.description

    def predict(self, batch: list[Any]) -> list[Any]:
        """Compute one result per item, in order.

        Raises:
            InvalidInput: an item is not what its operation takes; nothing was computed.
        """
        try:
            groups: dict[Hashable, list[int]] = {}
            requests = [self._prepared(item) for item in batch]
            for position, request in enumerate(requests):
                groups.setdefault(request.key, []).append(position)
            results: list[Any] = [None] * len(batch)
            for positions in groups.values():
                outputs = self._run([requests[position] for position in positions])
                for position, output in zip(positions, outputs, strict=True):
                    results[position] = plain(output)
            self.padding = _padding([[requests[at] for at in each] for each in groups.values()])
        except Exception as error:
            known: Any = _portable(error)
            if known is error:
                raise
            raise known from error
        return results

    def _prepared(self, item: object) -> Request:
        do, inputs, parameters = parse_item(item)
        if do == "describe":
            request = Request(do, None, {})
            request.group_by({})
            return request
        handler = self.handlers.get(do)
        if handler is None:
            raise InvalidInput(
                f"do: this model, of the task {self.task}, cannot {do[:60]!a}; it can "
                + " and ".join(self.handlers)
                + self._obstacle
            )
        request = Request(do, inputs, check_parameters(self.task, do, parameters))
        handler.prepare(request)
        return request

    def _run(self, requests: list[Request]) -> Iterable[Any]:
        do = requests[0].do
        if do == "describe":
            return [self.description] * len(requests)
        return self.handlers[do].run(requests)

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
                self._obstacle = f"; it makes no embeddings since {embedder.obstacle}"
            else:
                handlers["embed"] = embedder
        return handlers

    def _device(self) -> str:
        """The one that this worker sees; ``"cpu"`` in a thread hides no GPU that torch knows.

        Raises:
            RuntimeError: a GPU was named, and torch cannot use it.
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
            f"device {self.gpu_id} was asked for, but torch {torch.__version__} cannot use it: "
            f'{why}, or name "cpu"'
        )

    def _warm_up(self, batch_size: int) -> None:
        """The first run of an operation is slow: memory is allocated, kernels are chosen."""
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
    """Which share of the tokens was padding, as each group was padded to its longest text."""
    computed = sum(len(group) * max(each.tokens for each in group) for group in groups)
    tokens = sum(each.tokens for group in groups for each in group)
    return 1 - tokens / computed if computed else None


def _portable(error: Exception) -> Exception:
    """The error, or one in its place that the web process can load without transformers."""
    if is_out_of_memory(error):
        return error  # the worker makes the batch smaller
    module = type(error).__module__.partition(".")[0]
    if module in ("builtins", "service_streamer"):
        return error
    if type(error).__name__ == "PipelineException":  # of an input that a pipeline refuses
        return InvalidInput(f"inputs: {error}")
    return RuntimeError(f"{type(error).__name__}: {error}")
