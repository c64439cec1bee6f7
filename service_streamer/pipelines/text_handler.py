"""Handlers whose answers are texts that a model generates, and what they have in common.

A text is generated as a whole, by ``forward``, or token by token (``stepped_pipeline``): then
``begin`` says from what, and how its tokens are chosen.
"""

from __future__ import annotations

import contextlib
import copy
import secrets
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from ..errors import InvalidInput
from .handlers import Handler
from .inputs import are_tokens, read_text, read_tokens
from .requests import Request, quote
from .row_sampling import PENALTIES, Sampling, sampling_of
from .structure import FORMS
from .tasks import MOST_NEW_TOKENS
from .text_pieces import PromptTail, first_of
from .texts import fit_text, prepare_padding, token_limit, vocabulary_size

#: Default of ``max_new_tokens``, as in transformers' pipeline.
_NEW_TOKENS = 256

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "typical_p")
_PLAIN = ("num_return_sequences", "num_beams", "repetition_penalty")
_LEAST_TEMPERATURE = 1e-3

#: Tokens before the new ones that may say how those are written.
_BEFORE = 64

#: Parameters that need one step after the other.
BY_STEPS = ("logprobs", "logit_bias", "ignore_eos", "min_new_tokens", *PENALTIES, *FORMS)

#: Parameters that ``model.generate`` does not take.
_KEPT: tuple[str, ...] = ("stop", "return_full_text", *BY_STEPS)


class Beginning(NamedTuple):
    """From what the texts of a request are generated.

    Attributes:
        prompt: tokens that each text goes on from; of an encoder-decoder model, those of the
            decoder.
        sampling: how tokens are chosen.
        most: maximum number of new tokens of each text.
        encoded: what the encoder reads, without a dimension for batches; None without an encoder.
        seed: of the first text; None for any.
        texts: number of texts.
        stops: strings that end a text.
        encoder_output: what the encoder gives for ``encoded``, if that is known already.
    """

    prompt: list[int]
    sampling: Sampling
    most: int
    encoded: Any = None
    seed: int | None = None
    texts: int = 1
    stops: Sequence[str] = ()
    encoder_output: Any = None


class TextHandler(Handler):
    """Computes texts with a model's ``generate``, or prepares them for steps.

    Attributes:
        by_steps: whether texts are generated step by step, and not in ``forward``.
    """

    by_steps = False
    pipeline: Any

    @abstractmethod
    def begin(self, request: Request) -> Beginning | None:
        """From what a checked request's texts are generated, step by step.

        None if only ``forward`` can compute it, such as a search by beams.
        """

    def result(self, request: Request, rows: list[list[int]]) -> Any:  # noqa: ARG002
        """What the operation returns for these rows of new tokens.

        None if that is what ``Answer`` has counted on the way.
        """
        return None

    def example(self) -> Any:
        """What an encoder that reads no tokens may be tried with; else None."""
        return None

    def end_tokens(self) -> set[int]:
        """Tokens that end a text."""
        ends = self.pipeline.model.generation_config.eos_token_id
        if ends is None:
            return set()
        return set(ends) if isinstance(ends, (list, tuple)) else {int(ends)}


class GivenText(TextHandler):
    """Texts whose parameters are the requests' own.

    Args:
        pipeline: a pipeline of transformers.

    Attributes:
        samples_by_default: whether tokens are drawn if neither request nor model say.
        can_batch: whether requests with the same options may share a call of the model.
        takes_tokens: whether a prompt may be a list of the model's tokens.
    """

    samples_by_default = False
    takes_tokens = True
    can_batch = True

    def __init__(self, pipeline: Any) -> None:
        self.pipeline = pipeline
        self.tokenizer = pipeline.tokenizer
        self.defaults = pipeline.model.generation_config
        self.vocabulary = vocabulary_size(pipeline)

    def prepare(self, request: Request) -> None:
        """Check a request, and choose the options of its generation. Raises InvalidInput."""
        sent = request.parameters
        for name in ("logit_bias", "ignore_eos", "min_new_tokens", *PENALTIES):
            if name in sent and not sent[name]:
                del sent[name]  # as without it, which any worker can do
        for name in () if self.by_steps else BY_STEPS:
            if name in sent:
                raise InvalidInput(
                    f"parameters.{name}: this worker generates whole texts; leave it out, or "
                    "serve the model step by step"
                )
        if "json_schema" in sent and "regex" in sent:
            raise InvalidInput("parameters.regex: leave it out, or leave json_schema out")
        shared = self.read(request)
        options: dict[str, Any] = {"max_new_tokens": self._budget(request)}
        if sent.get("min_new_tokens", 0) > options["max_new_tokens"]:
            raise InvalidInput(
                f"parameters.min_new_tokens: must be at most {options['max_new_tokens']}, the "
                f"maximum number of generated tokens; not {sent['min_new_tokens']}"
            )
        options["do_sample"] = samples = self._samples(sent)
        for name in (*_PLAIN, *(_SAMPLING if samples else ())):
            if name in sent:
                options[name] = sent[name]
        if options.get("num_return_sequences", 1) > 1 and not samples:
            raise InvalidInput(
                "parameters.num_return_sequences: must be 1 without sampling; set a temperature "
                "above 0 to sample"
            )
        self._check_beams(options)
        kept = {name: sent[name] for name in _KEPT if name in sent}
        seed = sent.get("seed") if samples else None
        request.parameters = {**options, **kept, "seed": seed}
        usual = self.defaults
        is_alone = usual.prompt_lookup_num_tokens or usual.stop_strings
        if seed is not None or not self.can_batch or is_alone:
            # A shared batch would change the random numbers. A search for tokens in the prompt is
            # of one prompt. And what a stop string ends would have padding behind it.
            request.be_alone()
        else:
            length = self.same_length(request, options)
            request.group_by({**options, **kept}, *shared, length)

    def _check_beams(self, options: Mapping[str, Any]) -> None:
        beams = options.get("num_beams", self.defaults.num_beams) or 1
        if 1 < beams < options.get("num_return_sequences", 1):
            raise InvalidInput(
                f"parameters.num_return_sequences: must be at most {beams}, the number of beams; "
                f"not {options['num_return_sequences']}"
            )

    @abstractmethod
    def read(self, request: Request) -> tuple[Any, ...]:
        """Decode a request's inputs: sets ``encoded`` and ``tokens``. Raises InvalidInput.

        Returns:
            What requests must have in common to share a call of the model.
        """

    def same_length(self, request: Request, options: Mapping[str, Any]) -> int | None:  # noqa: ARG002
        """The request's length, if only those of this length may share its call; else None."""
        return None

    @abstractmethod
    def room(self, request: Request) -> int:
        """Maximum number of new tokens. Raises InvalidInput: the inputs leave none."""

    @abstractmethod
    def beyond(self, request: Request, room: int) -> str:
        """Why it has no room for more new tokens."""

    def _budget(self, request: Request) -> int:
        """Maximum number of new tokens: the request's, or the model's default."""
        asked = request.parameters.get("max_new_tokens")
        room = self.room(request)
        if asked is None:
            total = self.defaults.max_length
            usual = self.defaults.max_new_tokens or (
                max(1, total - self._begun(request)) if total else _NEW_TOKENS
            )
            return int(min(usual, room, MOST_NEW_TOKENS))
        if asked > room:
            raise InvalidInput(
                f"parameters.max_new_tokens: {self.beyond(request, room)}; not {asked}"
            )
        return int(asked)

    def _begun(self, request: Request) -> int:
        """Number of tokens before the new ones, which the model's ``max_length`` counts, too."""
        return request.tokens

    def _samples(self, sent: Mapping[str, Any]) -> bool:
        # A smaller temperature makes the logits overflow.
        if sent.get("temperature", 1) < _LEAST_TEMPERATURE:
            return False
        if "do_sample" in sent:
            return bool(sent["do_sample"])
        if sent.keys() & {*_SAMPLING, "seed"} or sent.get("num_return_sequences", 1) > 1:
            return True
        usual = self.defaults.do_sample
        return self.samples_by_default if usual is None else bool(usual)

    def looks_back(self, options: Mapping[str, Any]) -> bool:
        """Whether the choice of a token depends on the tokens before it, padding included."""
        usual = self.defaults
        penalty = options.get("repetition_penalty", usual.repetition_penalty)
        return bool((penalty or 1) != 1 or usual.no_repeat_ngram_size or usual.min_length)

    def begin(self, request: Request) -> Beginning | None:
        if has_prefix(self.pipeline):
            return None
        config = self.generation_config(request)
        sampling = sampling_of(
            self.pipeline.model,
            config,
            self._begun(request),
            encoded=self.encoder_tokens(request),
            alternatives=request.parameters.get("logprobs"),
            logit_bias=request.parameters.get("logit_bias", ()),
            least=request.parameters.get("min_new_tokens", 0),
            ends=tuple(self.end_tokens()),
            **{name: request.parameters[name] for name in PENALTIES if name in request.parameters},
        )
        if sampling is None:
            return None
        parameters = request.parameters
        prompt, encoded = self.rows_of(request, config)
        return Beginning(
            prompt,
            sampling,
            parameters["max_new_tokens"],
            encoded,
            parameters["seed"],
            parameters.get("num_return_sequences", 1),
            parameters.get("stop", ()),
        )

    def rows_of(self, request: Request, config: Any) -> tuple[list[int], Any]:  # noqa: ARG002
        """The tokens that each text goes on from, and what an encoder reads.

        Args:
            config: of ``generation_config``, after ``sampling_of``.
        """
        return request.encoded, None

    def encoder_tokens(self, request: Request) -> list[int] | None:  # noqa: ARG002
        """The tokens that an encoder reads; None if there is none, or it reads something else."""
        return None

    def generation_config(self, request: Request) -> Any:
        """The ``GenerationConfig`` with which ``model.generate`` would compute the request."""
        return self._config(_keywords(request.parameters))

    def _config(self, keywords: dict[str, Any]) -> Any:
        base = keywords.pop("generation_config", None)
        config, _ = self.pipeline.model._prepare_generation_config(base, **keywords)
        return config

    def _options(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """The keywords of ``model.generate``."""
        options = _keywords(parameters)
        if self.defaults.stop_strings:
            options["tokenizer"] = self.tokenizer
        if "stop" in parameters:
            options["stopping_criteria"] = _stopping_at(self.tokenizer, parameters["stop"])
        return options

    def _generated(self, batch: list[Request], skip: int, **inputs: Any) -> list[list[list[int]]]:
        """The rows of new tokens of each request, in one call of the model.

        Args:
            skip: number of tokens before the new ones.
            inputs: of the model, on its device.
        """
        with self._sampling(batch[0]), self.pipeline.device_placement():
            sequences = self.pipeline.model.generate(
                **inputs,
                pad_token_id=self.tokenizer.pad_token_id,
                **self._options(batch[0].parameters),
            )
        rows = sequences[:, skip:].tolist()
        each = len(rows) // len(batch)
        return [rows[at * each : (at + 1) * each] for at in range(len(batch))]

    def _ended(
        self, row: list[int], stops: Sequence[str], prompt: Sequence[int] = ()
    ) -> dict[str, Any]:
        """The text of a row of new tokens, which may have padding behind its end."""
        tail = PromptTail(self._text, prompt)
        ends = self.end_tokens()
        length = next((at for at, token in enumerate(row) if token in ends), None)
        reason, count = ("length", len(row)) if length is None else ("stop", length + 1)
        text = tail.text_behind(row[:length])
        at = first_of(stops, text)
        if at is not None:
            low, high = 1, count  # the least number of tokens that has it
            while low < high:
                middle = (low + high) // 2
                if first_of(stops, tail.text_behind(row[:middle])) is None:
                    low = middle + 1
                else:
                    high = middle
            text, reason, count = text[:at], "stop", low
        return {"text": text, "finish_reason": reason, "completion_tokens": count}

    def _text(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    @contextlib.contextmanager
    def _sampling(self, request: Request) -> Iterator[None]:
        """Sample from a forked random generator: torch's belongs to the whole process.

        A fresh process always starts with the same state, so without a new seed all workers would
        generate the same texts.
        """
        if not request.parameters["do_sample"]:
            yield
            return
        import torch

        seed = request.parameters["seed"]
        device = self.pipeline.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(secrets.randbits(63) if seed is None else seed)
            yield


class PromptedText(GivenText):
    """Texts whose inputs are texts, or lists of tokens.

    Args:
        pipeline: a pipeline of transformers.
    """

    #: Where shorter inputs of a batch are padded.
    side: Literal["left", "right"]

    def __init__(self, pipeline: Any) -> None:
        super().__init__(pipeline)
        self.can_batch = prepare_padding(pipeline.model, self.tokenizer, self.side)
        self.limit = token_limit(pipeline.model, self.tokenizer)
        #: For ``prepare``, which may run in another thread than ``forward``.
        self.counter = copy.deepcopy(self.tokenizer)

    def read(self, request: Request) -> tuple[Any, ...]:
        is_chat = isinstance(request.inputs, (list, tuple))
        if self.takes_tokens and are_tokens(request.inputs):
            request.encoded = read_tokens(request.inputs, self.vocabulary)
        elif is_chat:
            request.encoded = self.encode_chat(request)
        else:
            text = read_text(request.inputs, may_be_blank=True)
            fit_text(text, self.limit, self.tokenizer)
            request.encoded = list(self.counter(text)["input_ids"])
        request.tokens = len(request.encoded)
        if not request.tokens:
            raise InvalidInput(f"inputs: {quote(request.inputs)} has no tokens; send a text")
        return (is_chat,)

    def encode_chat(self, request: Request) -> list[int]:  # noqa: ARG002
        """The tokens of a chat. Raises InvalidInput."""
        raise InvalidInput("inputs: this model does not support chats; send a string")

    def texts_of(self, batch: list[Request], *, goes_on: bool) -> list[list[dict[str, Any]]]:
        """The texts of each request, with their ends, in one call of the model.

        Args:
            goes_on: whether texts go on from the inputs; else they are a decoder's.
        """
        prompts = {"input_ids": [request.encoded for request in batch]}
        encoded = self.tokenizer.pad(prompts, padding=len(batch) > 1, return_tensors="pt")
        ids, device = encoded["input_ids"], self.pipeline.device
        found = self._generated(
            batch,
            ids.shape[1] if goes_on else 1,  # the decoder's start
            input_ids=ids.to(device),
            attention_mask=encoded["attention_mask"].to(device),
        )
        stops = batch[0].parameters.get("stop", ())
        return [
            [
                {
                    **self._ended(row, stops, request.encoded if goes_on else ()),
                    "prompt_tokens": request.tokens,
                }
                for row in rows
            ]
            for request, rows in zip(batch, found, strict=True)
        ]


def _stopping_at(tokenizer: Any, stops: Sequence[str]) -> Any:
    """A criterion that ends a row once its new text has one of the strings.

    transformers' own ``stop_strings`` prepares the whole vocabulary for each new list of strings.
    """
    from transformers import StoppingCriteria, StoppingCriteriaList

    #: A token has at least one byte; some more for tokens without text.
    window = 8 + 4 * max(map(len, stops))

    def decode(tokens: list[int]) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=True))

    def has_stop(before: list[int], tokens: list[int]) -> bool:
        text = PromptTail(decode, before).text_behind(tokens)
        return first_of(stops, text) is not None

    class Stopping(StoppingCriteria):  # type: ignore[misc, unused-ignore]
        prompt: int | None = None

        def __call__(self, input_ids: Any, _scores: Any, **_options: Any) -> Any:
            import torch

            if self.prompt is None:
                self.prompt = input_ids.shape[1] - 1
            start = max(self.prompt, input_ids.shape[1] - window)
            known = max(0, start - _BEFORE)
            rows = input_ids[:, known:].tolist()
            done = [has_stop(row[: start - known], row[start - known :]) for row in rows]
            return torch.tensor(done, device=input_ids.device)

    return StoppingCriteriaList([Stopping()])


def has_prefix(pipeline: Any) -> bool:
    """Whether it writes a text before each prompt, which old models want."""
    return bool(getattr(pipeline, "_preprocess_params", {}).get("prefix"))


def _keywords(parameters: Mapping[str, Any]) -> dict[str, Any]:
    ours = {*_KEPT, "seed"}
    return {name: value for name, value in parameters.items() if name not in ours}
