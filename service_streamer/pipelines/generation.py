"""Text generation: two operations.

"predict"     through the pipeline, in its own form
"generate"    through the model, with finish reason and number of tokens

Inputs are prompts, or chats of which the tokenizer's template makes prompts.
"""

from __future__ import annotations

import contextlib
import copy
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..errors import InvalidInput
from .handlers import Handler
from .inputs import read_text
from .requests import Request, call_pipeline, plain, quote
from .row_sampling import PENALTIES
from .structure import FORMS
from .tasks import MOST_NEW_TOKENS
from .text_pieces import first_of
from .texts import fit_text, prepare_padding, token_limit

__all__ = ["BY_STEPS", "Generator", "PipelineGenerator"]

#: Default of ``max_new_tokens``, as in transformers' pipeline.
_NEW_TOKENS = 256

_SAMPLING = ("temperature", "top_p", "top_k", "min_p")
_LEAST_TEMPERATURE = 1e-3
_MOST_MESSAGES = 256

#: Parameters that ``model.generate`` does not take.
_KEPT: tuple[str, ...] = ("stop", "return_full_text", "logprobs", *PENALTIES, *FORMS)

#: Parameters that need one step after the other.
BY_STEPS = ("logprobs", *PENALTIES, *FORMS)


class Generator(Handler):
    """ "generate": continues prompts, with finish reasons.

    Args:
        pipeline: a pipeline of transformers.
    """

    samples_by_default = False
    #: Whether the texts are generated step by step (``stepped_pipeline``), not in ``forward``.
    by_steps = False

    def __init__(self, pipeline: Any) -> None:
        self.pipeline = pipeline
        self.tokenizer = pipeline.tokenizer
        self.defaults = pipeline.model.generation_config
        self.can_batch = prepare_padding(pipeline.model, self.tokenizer, "left")
        self.limit = token_limit(pipeline.model, self.tokenizer)
        #: For ``prepare``, which may run in another thread than ``forward``.
        self._counter = copy.deepcopy(self.tokenizer)

    def prepare(self, request: Request) -> None:
        """Check a request, and choose the options of its generation. Raises InvalidInput."""
        sent = request.parameters
        for name in PENALTIES:
            if sent.get(name) == 0:
                del sent[name]  # as without it, which any worker can do
        for name in () if self.by_steps else BY_STEPS:
            if name in sent:
                raise InvalidInput(
                    f"parameters.{name}: this worker generates whole texts; leave {name} out, or "
                    "serve the model step by step"
                )
        if "json_schema" in sent and "regex" in sent:
            raise InvalidInput("parameters.regex: leave it out, or leave json_schema out")
        is_chat = isinstance(request.inputs, (list, tuple))
        if is_chat:
            request.encoded = self._encode_chat(request)
        else:
            text = read_text(request.inputs, may_be_blank=True)
            fit_text(text, self.limit, self.tokenizer)
            request.encoded = list(self._counter(text)["input_ids"])
        request.tokens = len(request.encoded)
        if not request.tokens:
            raise InvalidInput(f"inputs: {quote(request.inputs)} has no tokens; send a text")
        options: dict[str, Any] = {"max_new_tokens": self._budget(request)}
        options["do_sample"] = samples = self._samples(sent)
        for name in ("num_return_sequences", "repetition_penalty", *(_SAMPLING if samples else ())):
            if name in sent:
                options[name] = sent[name]
        if options.get("num_return_sequences", 1) > 1 and not samples:
            raise InvalidInput(
                "parameters.num_return_sequences: must be 1 without sampling; set a temperature "
                "above 0 to sample"
            )
        kept = {name: sent[name] for name in _KEPT if name in sent}
        seed = sent.get("seed") if samples else None
        request.parameters = {**options, **kept, "seed": seed}
        if seed is not None or not self.can_batch:
            request.be_alone()  # a shared batch would change the random numbers
        else:
            # Options that read the prompt would read its padding, too.
            length = request.tokens if self._looks_back(options) else None
            request.group_by({**options, **kept}, is_chat, length)

    def forward(self, batch: list[Request]) -> list[Any]:
        """Compute requests of one group, in one call of the model."""
        options = self._options(batch[0].parameters)
        prompts = {"input_ids": [request.encoded for request in batch]}
        encoded = self.tokenizer.pad(prompts, padding=len(batch) > 1, return_tensors="pt")
        ids = encoded["input_ids"].to(self.pipeline.device)
        with self._sampling(batch[0]), self.pipeline.device_placement():
            sequences = self.pipeline.model.generate(
                input_ids=ids,
                attention_mask=encoded["attention_mask"].to(self.pipeline.device),
                pad_token_id=self.tokenizer.pad_token_id,
                **options,
            )
        rows = sequences[:, ids.shape[1] :].tolist()
        each = len(rows) // len(batch)
        stops = batch[0].parameters.get("stop", ())
        return [
            [
                {**self._ended(row, stops), "prompt_tokens": request.tokens}
                for row in rows[at * each : (at + 1) * each]
            ]
            for at, request in enumerate(batch)
        ]

    def _ended(self, row: list[int], stops: Sequence[str]) -> dict[str, Any]:
        """The text of a row of new tokens, which may have padding behind its end."""
        ends = self.end_tokens()
        length = next((at for at, token in enumerate(row) if token in ends), None)
        reason, count = ("length", len(row)) if length is None else ("stop", length + 1)
        text = self._text(row[:length])
        at = first_of(stops, text)
        if at is not None:
            low, high = 1, count  # the least number of tokens that has it
            while low < high:
                middle = (low + high) // 2
                if first_of(stops, self._text(row[:middle])) is None:
                    low = middle + 1
                else:
                    high = middle
            text, reason, count = text[:at], "stop", low
        return {"text": text, "finish_reason": reason, "completion_tokens": count}

    def _text(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def generation_config(self, request: Request) -> Any:
        """The ``GenerationConfig`` with which ``model.generate`` would compute the request."""
        return self._config(_keywords(request.parameters))

    def result(self, request: Request, rows: list[list[int]]) -> Any:  # noqa: ARG002
        """What the operation returns for these rows of new tokens.

        None if that is what ``Answer`` has counted on the way.
        """
        return None

    def end_tokens(self) -> set[int]:
        """Tokens that end a text."""
        ends = self.defaults.eos_token_id
        if ends is None:
            return set()
        return set(ends) if isinstance(ends, (list, tuple)) else {int(ends)}

    def _config(self, keywords: dict[str, Any]) -> Any:
        base = keywords.pop("generation_config", None)
        config, _ = self.pipeline.model._prepare_generation_config(base, **keywords)
        return config

    def _options(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """The keywords of ``model.generate``."""
        options = _keywords(parameters)
        if "stop" in parameters:
            options["stopping_criteria"] = _stopping(self.tokenizer, parameters["stop"])
        return options

    def _budget(self, request: Request) -> int:
        """Maximum number of new tokens: the request's, or the model's default."""
        asked = request.parameters.get("max_new_tokens")
        room = MOST_NEW_TOKENS if self.limit is None else self.limit - request.tokens
        if room < 1:
            raise InvalidInput(
                f"inputs: the text has {request.tokens} tokens, and the limit is {self.limit} "
                "including generated tokens; shorten it"
            )
        if asked is None:
            total = self.defaults.max_length
            usual = self.defaults.max_new_tokens or (
                max(1, total - request.tokens) if total else _NEW_TOKENS
            )
            return int(min(usual, room, MOST_NEW_TOKENS))
        if asked > room:
            raise InvalidInput(
                f"parameters.max_new_tokens: the text has {request.tokens} tokens, which leaves "
                f"{room} of the model's {self.limit}; not {asked}"
            )
        return int(asked)

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

    def _looks_back(self, options: Mapping[str, Any]) -> bool:
        usual = self.defaults
        penalty = options.get("repetition_penalty", usual.repetition_penalty)
        return bool((penalty or 1) != 1 or usual.no_repeat_ngram_size or usual.min_length)

    def _encode_chat(self, request: Request) -> list[int]:
        messages = request.inputs
        if not self.tokenizer.chat_template:
            raise InvalidInput("inputs: this model does not support chats; send a string")
        if not 1 <= len(messages) <= _MOST_MESSAGES:
            raise InvalidInput(f"inputs: a chat must have 1 to {_MOST_MESSAGES} messages")
        whole = ""
        for number, message in enumerate(messages):
            if not isinstance(message, Mapping) or message.keys() != {"role", "content"}:
                raise InvalidInput(
                    f'inputs[{number}]: must be {{"role": ..., "content": ...}}; '
                    f"not {quote(message)}"
                )
            for name, value in message.items():  # strings only: other content may name files
                field = f"inputs[{number}].{name}"
                whole += read_text(value, field=field, may_be_blank=True)
                fit_text(whole, self.limit, self.tokenizer, field=field)
        request.inputs = [dict(message) for message in messages]
        goes_on = messages[-1]["role"] == "assistant"
        try:
            ids = self._counter.apply_chat_template(
                request.inputs,
                add_generation_prompt=not goes_on,
                continue_final_message=goes_on,
                return_dict=True,
            )["input_ids"]
        except Exception as error:  # the template's own checks raise errors of jinja2
            raise InvalidInput(f"inputs: the model's template refuses the chat: {error}") from None
        return list(ids)

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


class PipelineGenerator(Generator):
    """ "predict" of text generation, in the pipeline's own form."""

    samples_by_default = True

    def forward(self, batch: list[Request]) -> list[Any]:
        """Compute requests of one group, in one call of the pipeline."""
        parameters = batch[0].parameters
        options = self._options(parameters)
        if "return_full_text" in parameters:
            options["return_full_text"] = parameters["return_full_text"]
        inputs = [request.inputs for request in batch]
        with self._sampling(batch[0]):
            outputs = call_pipeline(self.pipeline, inputs, options, len(inputs))
        if stops := parameters.get("stop"):
            for request, records in zip(batch, outputs, strict=True):
                for record in records:
                    _cut(record, request.inputs, stops)
        return outputs

    def result(self, request: Request, rows: list[list[int]]) -> Any:
        """The pipeline's result for these rows of new tokens."""
        import torch
        from transformers.utils.chat_template_utils import Chat

        prompt, parameters = request.encoded, request.parameters
        is_text = isinstance(request.inputs, str)
        options = self.pipeline._sanitize_parameters(
            return_full_text=parameters.get("return_full_text")
        )[2]
        records: list[Any] = []
        for row in rows:
            outputs = {
                "generated_sequence": torch.tensor([[[*prompt, *row]]]),
                "input_ids": torch.tensor([prompt]),
                "prompt_text": request.inputs if is_text else Chat(request.inputs),
            }
            records += self.pipeline.postprocess(outputs, **options)
        for record in records:
            _cut(record, request.inputs, parameters.get("stop", ()))
        return plain(records)

    def _config(self, keywords: dict[str, Any]) -> Any:
        return super()._config(self.pipeline._prepare_generate_kwargs(keywords))


def _keywords(parameters: Mapping[str, Any]) -> dict[str, Any]:
    ours = {*_KEPT, "seed"}
    return {name: value for name, value in parameters.items() if name not in ours}


def _cut(record: dict[str, Any], inputs: Any, stops: Sequence[str]) -> None:
    """Cut a record's generated text at the first stop string; keep the whole prompt."""
    holder, name, text = record, "generated_text", record["generated_text"]
    if isinstance(text, list):
        holder, name, text = text[-1], "content", text[-1]["content"]
        inputs = inputs[-1]["content"] if inputs[-1]["role"] == "assistant" else ""
    prompt = inputs if isinstance(inputs, str) and text.startswith(inputs) else ""
    at = first_of(stops, text, len(prompt))
    if at is not None:
        holder[name] = text[:at]


def _stopping(tokenizer: Any, stops: Sequence[str]) -> Any:
    """A criterion that ends a row once its new text has one of the strings.

    transformers' own ``stop_strings`` prepares the whole vocabulary for each new list of strings.
    """
    from transformers import StoppingCriteria, StoppingCriteriaList

    #: A token has at least one byte; some more for tokens without text.
    tail = 8 + 4 * max(map(len, stops))

    class Stopping(StoppingCriteria):  # type: ignore[misc, unused-ignore]
        prompt: int | None = None

        def __call__(self, input_ids: Any, _scores: Any, **_options: Any) -> Any:
            import torch

            if self.prompt is None:
                self.prompt = input_ids.shape[1] - 1
            start = max(self.prompt, input_ids.shape[1] - tail)
            texts = tokenizer.batch_decode(input_ids[:, start:], skip_special_tokens=True)
            done = [first_of(stops, text) is not None for text in texts]
            return torch.tensor(done, device=input_ids.device)

    return StoppingCriteriaList([Stopping()])
