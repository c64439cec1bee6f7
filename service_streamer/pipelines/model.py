"""A transformers pipeline as a ManagedModel: many requests, few forward passes."""

from __future__ import annotations

import logging
import os
from collections.abc import Hashable
from functools import partial
from typing import Any, NamedTuple

from ..errors import InvalidInput, InvalidItems
from ..gpu.out_of_memory import is_out_of_memory
from ..managed_model import ManagedModel
from .description import describe_pipeline, example_of
from .handlers import NO_BUCKETS, Buckets, Describer, Handler, make_buckets, portable_errors
from .hub import remember
from .loading import find_model, generates, load_pipeline, read_json, shown_name
from .requests import Request
from .sizes import item_length
from .sounds import CPU_SECONDS, GPU_SECONDS
from .task_handlers import handlers_of
from .tasks import TASKS, check_parameters, check_suits, parse_item
from .weights import Loading

logger = logging.getLogger(__name__)


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
    - ``"score"`` (text-generation): ``[{"token", "id", "logprob", "top"}, ...]`` of the text
      itself;
    - ``"embed"`` (feature-extraction): ``{"embedding", "tokens"}``, a vector of length 1;
    - ``"embed_all"`` (feature-extraction): as ``"predict"``;
    - ``"rerank"`` (text-classification with one label): ``{"score", "tokens"}`` of a pair of texts;
    - ``"tokenize"`` and ``"decode"``: a text's tokens, and the text of a list of tokens. Such a
      list may stand for the text of ``"generate"``, ``"score"``, ``"embed"`` and ``"embed_all"``;
    - ``"describe"``: what ``describe`` returns, for web services of earlier versions.

    Texts of one operation are computed together, whatever their parameters are. Generated texts,
    images, sounds and zero-shot classification share a batch if their parameters are the same. All
    items are checked before anything is computed, and ``InvalidItems`` names the invalid ones.
    Paths and addresses in items are never opened.
    """

    task: str

    def raise_if_unwanted(self) -> None:
        """Raises InvalidInput: nobody waits for the batch any more. Workers replace it."""

    @classmethod
    def _variant(
        cls,
        model: str | os.PathLike[str] | None = None,
        task: str | None = None,
        dtype: str = "auto",  # noqa: ARG003
        batch_size: int = 64,  # noqa: ARG003
        revision: str | None = None,
        commit: str | None = None,
        **_: Any,
    ) -> type[ManagedModel]:
        if cls is PipelineModel and generates(model, task, revision, commit):
            from .stepped_pipeline import SteppedPipeline  # which imports this module

            return SteppedPipeline
        return cls

    #: Length of items, for the web process, which has neither the model nor its task.
    length = staticmethod(item_length)

    def init_preprocess(
        self,
        model: str | os.PathLike[str] | None = None,
        task: str | None = None,
        dtype: str = "auto",
        batch_size: int = 64,
        revision: str | None = None,
        commit: str | None = None,
        **_: Any,
    ) -> None:
        """In a process of ``preprocess_workers``, load what decodes items, but no weights.

        Raises:
            ValueError: the task takes texts.
            Exception: as ``init_model``.
        """
        if not self.preprocesses_only:
            return
        source, hub = find_model(model, revision, commit)
        self.model, _precision = load_pipeline(source, task, Loading(dtype, device="meta"), hub)
        self.task = self.model.task
        check_suits(self.task, {"preprocess_workers": True})
        self.handlers, self._obstacle = handlers_of(
            self.model, partial(read_json, source, hub=hub), batch_size
        )
        self._describer = Describer({})

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
        devices: int | None = None,
        compile: bool = False,  # noqa: A002 - torch's name
        max_batch_tokens: int | None = None,
        max_batch_seconds: int | None = None,
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
                None for those of this worker's entry of ``cuda_devices``, such as "0,1".
            compile: whether to compile the model with torch.compile, for a few shapes to which
                batches are padded. It takes minutes.
            max_batch_tokens: upper bound on the tokens of a forward pass, padding included; larger
                batches are computed in parts, and a text beyond it alone. None sets no bound.
            max_batch_seconds: upper bound on the seconds of sound of a forward pass; larger batches
                are computed in parts. A longer sound is recognized in pieces, and is invalid where
                the model cannot do that. None for 60 on a CPU, 600 on a GPU.

        Raises:
            FileNotFoundError: there is no such model, or a file of it is missing.
            ImportError: a package that the task or an argument needs is missing.
            RuntimeError: the model was loaded but does not run; or torch cannot use the GPU.
            ValueError: the task is unknown or unsupported by the model; or an argument is wrong,
                or unsupported by the model or the device.
        """
        source, hub = find_model(model, revision, commit)
        devices = devices or str(self.gpu_id).count(",") + 1
        loading = Loading(dtype, attention, quantization, self._device(), devices)
        self.model, precision = load_pipeline(source, task, loading, hub)
        self.task = self.model.task
        self.handlers, self._obstacle = handlers_of(
            self.model, partial(read_json, source, hub=hub), batch_size
        )
        self.buckets = self._buckets(
            batch_size, max_batch_tokens, max_batch_seconds, compiles=compile
        )
        self.description = describe_pipeline(self.model, shown_name(source), list(self.handlers))
        if self._obstacle:
            logger.warning("There are no sentence embeddings of this model: %s", self._obstacle)
        self.description["no_embeddings"] = self._obstacle or None
        limit = min((each.limit for each in self.handlers.values() if each.limit), default=None)
        self._example = example_of(self.model, limit)
        self.description |= {"max_tokens": limit, "example": self._example["inputs"]}
        if any(handler.computes_whole for handler in self.handlers.values()):
            rate = self.model.feature_extractor.sampling_rate
            self.description["max_sound_seconds"] = (self.buckets.most or 0) // rate
        self.description |= {
            "revision": None if hub is None else hub.commit,
            "dtype": precision.dtype,
            "dtype_reason": precision.reason,
            "quantization": quantization,
            "compiled": compile,
            "batch_sizes": list(self.buckets.rows) or None,
        }
        self._describer = Describer(self.description)
        if hub is not None:
            remember(hub)
        if not compile:  # one of chunks, rows or tokens: a batch may end between them
            self.model.model.register_forward_pre_hook(lambda *_: self.raise_if_unwanted())
        if compile:
            compile_model(self.model.model, len(list(self.buckets.shapes())) * len(self.handlers))
        self._warm_up(batch_size)

    def describe(self) -> dict[str, Any]:
        return self.description

    def preprocess(self, items: list[Any]) -> list[Any]:
        """Check and decode a batch's items, and tokenize its texts.

        Returns:
            Groups; requests if they go to ``collate``.

        Raises:
            InvalidItems: some of them are invalid; nothing was computed.
        """
        with portable_errors():
            requests = self.checked(items)
            return requests if self.preprocesses_only else self._grouped(requests)

    def collate(self, parts: list[list[Request]]) -> list[Group]:
        """Join the requests that several processes have decoded."""
        requests = [request for part in parts for request in part]
        for position, request in enumerate(requests):
            request.position = position
        with portable_errors():
            return self._grouped(requests)

    def compute(self, requests: list[Request]) -> list[Any]:
        """One result for each of these requests, which ``checked`` returned."""
        for position, request in enumerate(requests):
            request.position = position
        return self.postprocess(self.forward(self._grouped(requests)))

    def _grouped(self, requests: list[Request]) -> list[Group]:
        """Requests that share a forward pass, with what it is given."""
        seconds, most = self.description["max_sound_seconds"], self.buckets.most or 0
        if seconds and (long := [each.position for each in requests if each.tokens > most]):
            # Not before: a preprocess process does not know the device.
            says = f"the sound is too long; the model takes {seconds} seconds (max_batch_seconds)"
            wrong = {at: InvalidInput(f"inputs: {says}; send it in parts") for at in long}
            raise InvalidItems(wrong)
        groups: dict[Hashable, list[Request]] = {}
        for request in requests:
            groups.setdefault(request.key, []).append(request)
        together = [
            [group[at] for at in part]
            for group in groups.values()
            for part in self.buckets.parts([each.tokens for each in group])
        ]
        with_handlers = ((self._handler(each[0]), each) for each in together)
        return [Group(handler, each, handler.collate(each)) for handler, each in with_handlers]

    def forward(self, batch: list[Group]) -> list[tuple[Group, Any]]:
        """Compute each group; its outputs may be on the GPU still."""
        with portable_errors():
            # Without its inputs: the GPU's memory would be full of them.
            return [(each._replace(batch=None), each.handler.forward(each.batch)) for each in batch]

    def postprocess(self, outputs: list[tuple[Group, Any]]) -> list[Any]:
        """One result per item, in order."""
        with portable_errors():
            results: list[Any] = [None] * sum(len(group.requests) for group, _ in outputs)
            for group, output in outputs:
                finished = group.handler.finish(group.requests, output)
                for request, result in zip(group.requests, finished, strict=True):
                    results[request.position] = result
            self.padding = _padding([group.requests for group, _ in outputs])
            return results

    def checked(self, items: list[Any]) -> list[Request]:
        """The items as requests. Raises InvalidItems."""
        requests: list[Request] = []
        wrong: dict[int, Exception] = {}
        for position, item in enumerate(items):
            try:
                requests.append(self._prepared(position, item))
            except InvalidInput as error:
                wrong[position] = error
        together: dict[str, list[Request]] = {}
        for request in requests:
            together.setdefault(request.do, []).append(request)
        for each in together.values():
            self._handler(each[0]).encode(each)
        wrong |= {each.position: each.error for each in requests if each.error is not None}
        if wrong:
            raise InvalidItems(dict(sorted(wrong.items())))
        return requests

    def _prepared(self, position: int, item: object) -> Request:
        do, inputs, parameters = parse_item(item)
        if do != "describe":
            if do not in self.handlers:
                raise InvalidInput(
                    f"do: this model, of the task {self.task}, cannot {do[:60]!a}; it can "
                    + " and ".join(self.handlers)
                    + (f"; it cannot embed, since {self._obstacle}" if self._obstacle else "")
                )
            parameters = check_parameters(self.task, do, parameters)
        request = Request(do, inputs, parameters, position)
        request.wants_arrays = isinstance(item, dict) and item.get("arrays") is True
        self._handler(request).prepare(request)
        return request

    def _handler(self, request: Request) -> Handler:
        return self._describer if request.do == "describe" else self.handlers[request.do]

    def _buckets(
        self, batch_size: int, most: int | None, seconds: int | None, *, compiles: bool
    ) -> Buckets:
        """The shapes of batches, which each handler gets.

        Raises:
            ValueError: an argument does not suit the task.
        """
        check_suits(self.task, {"max_batch_tokens": most, "compile": compiles})
        check_suits(self.task, {"max_batch_seconds": seconds})
        takes = TASKS[self.task].takes
        if takes == "audio":
            usual = CPU_SECONDS if self.model.device.type == "cpu" else GPU_SECONDS
            most = (seconds or usual) * self.model.feature_extractor.sampling_rate
        buckets = NO_BUCKETS._replace(most=most)
        handlers = self.handlers.values()
        if compiles:
            # Also where a task suits: image processors may keep the shapes of images.
            if not all(handler.has_buckets for handler in handlers):
                raise ValueError(
                    f"models of {self.task} cannot be compiled here; leave compile out"
                )
            limit = max((each.limit for each in handlers if each.limit), default=None)
            buckets = make_buckets(batch_size, limit if takes == "text" else 0, most)
        for handler in handlers:
            handler.buckets = buckets
        return buckets

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
        sizes = (1,) if self.model.device.type == "cpu" else (1, batch_size)
        for do, handler in self.handlers.items():
            if not handler.warms_up:
                continue
            example = {"do": do, **self._example}
            batches = [({**example}, size) for size in dict.fromkeys(sizes)]
            if self.buckets.rows:
                batches = [
                    (self._of_length(example, min(tokens, handler.limit or tokens)), rows)
                    for rows, tokens in self.buckets.shapes()
                ]
            for item, size in batches:
                if do == "embed":  # tokens, since a prompt would lengthen a text
                    item["inputs"] = self.model.tokenizer(item["inputs"])["input_ids"]
                try:
                    self.predict([item] * size)
                except Exception as error:
                    if size > 1 and is_out_of_memory(error):
                        continue  # the worker makes such batches smaller
                    raise RuntimeError(
                        f"the model was loaded, but its first {do!r} of {size} failed: "
                        f"{type(error).__name__}: {error}"
                    ) from error

    def _of_length(self, example: dict[str, Any], tokens: int) -> dict[str, Any]:
        """The example, with a text of so many tokens; 0 leaves it as it is."""
        if not tokens:
            return {**example}
        tokenizer = self.model.tokenizer
        word = tokenizer.mask_token if self.task == "fill-mask" else "a"
        return {**example, "inputs": text_of(tokenizer, word, tokens)}


def _padding(groups: list[list[Request]]) -> float | None:
    """Share of padding among the tokens: each group is padded to its longest text."""
    computed = sum(len(group) * max(each.tokens for each in group) for group in groups)
    tokens = sum(each.tokens for group in groups for each in group)
    return 1 - tokens / computed if computed else None


def compile_model(model: Any, shapes: int) -> None:
    """Compile a transformers model for shapes that are compiled when they first occur.

    The head of a model stays as it is: it is one or two kernels, and may get a part of the tokens.

    Args:
        shapes: how many shapes there will be.
    """
    import torch

    # Beyond the limit a model would run uncompiled, without an error. One more for each shape: the
    # flags that torch guards differ between the first call and later ones.
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, 2 * shapes)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 4 * shapes)
    model.base_model.compile(dynamic=False)


def text_of(tokenizer: Any, word: str, tokens: int) -> str:
    """A text of ``tokens`` tokens, or of a few less: a word again and again.

    Args:
        word: what the text begins with; "a" follows.
    """

    def text(count: int) -> str:
        return word + " a" * count

    def length(count: int) -> int:
        return len(tokenizer(text(count))["input_ids"])

    # Most tokenizers make one or two tokens of " a".
    low, high = 0, tokens
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if length(middle) <= tokens else (low, middle - 1)
    return text(low)
