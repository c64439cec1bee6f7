"""Text generation with a small Llama: the beginning of a text goes in, the text comes out.

The model that is shipped is a toy: it has learnt the verses and sentences of
``example/data/text_infilling.txt`` by heart, and completes them from their first words. Its
tokenizer has a chat template: in a chat it answers a line with those that follow. Any causal
language model of the hub or a folder of your own takes its place, such as SmolLM2, Llama, Qwen or
one that you have fine-tuned.

The web process imports this file only to name ``ManagedGenerationModel``: so nothing here may
import torch or transformers at module level.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from example_common import locate, quote
from service_streamer import InvalidInput, InvalidItems, ManagedModel

if TYPE_CHECKING:
    import torch

DEFAULT_MODEL = Path(__file__).resolve().parent / "models" / "text_generation"
HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"  # another model that would do
MAX_NEW_TOKENS = 40


class TextGenerationModel:
    """A causal language model that goes on with texts, always with the likeliest next token.

    Args:
        max_new_tokens: the most tokens that it adds to a text.
        model_path: a folder that ``save_pretrained`` wrote, or a name on the model hub.
        device: where to run, such as ``"cpu"`` or ``"cuda"``; the GPU if there is one by default.

    Raises:
        ValueError: ``max_new_tokens`` is no int of 1 or more, or leaves the model no room for a
            text.
        FileNotFoundError: no model is found at ``model_path``.
    """

    def __init__(
        self,
        max_new_tokens: int = MAX_NEW_TOKENS,
        model_path: str | os.PathLike[str] = DEFAULT_MODEL,
        device: str | torch.device | None = None,
    ) -> None:
        _check_count(max_new_tokens)
        source = locate(model_path, HUB_NAME)

        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

        # Every worker would draw its own into the log of the service.
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.tokenizer: Any = AutoTokenizer.from_pretrained(source, padding_side="left")
        model: Any = AutoModelForCausalLM.from_pretrained(source)
        if self.device.type == "cpu":
            model = (
                model.float()
            )  # a CPU computes with the 16 bits that GPUs like slowly, if at all
        self.model = model.to(self.device).eval()
        eos = model.generation_config.eos_token_id
        if eos is None:
            eos = self.tokenizer.eos_token_id
        self._start = self.tokenizer.bos_token_id
        # Some models have none: the attention mask hides them, so any token will do.
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.max_new_tokens = max_new_tokens
        self.max_prompt_tokens = _room(model, model_path, max_new_tokens)
        self._options = {
            "max_new_tokens": max_new_tokens,
            "do_sample": False,
            "num_beams": 1,
            "eos_token_id": eos,
            "pad_token_id": self.tokenizer.pad_token_id,
        }

    def predict(self, batch: list[str]) -> list[str]:
        """Returns each text with what follows it, in order. Nothing is computed if one is bad.

        Raises:
            InvalidInput: a text is no string, blank, no valid Unicode or too long.
        """
        if not batch:
            return []
        added = self.go_on([self.encode(text) for text in batch])
        return [_join(text, more) for text, more in zip(batch, added, strict=True)]

    def go_on(self, rows: list[list[int]]) -> list[str]:
        """Returns the text that follows each row of token ids, in order."""
        import torch

        width = max(map(len, rows))
        # On the left, so that all rows end, and go on, at the same place. The mask comes from the
        # lengths: a user may write a padding token in a text.
        ids = [[self.tokenizer.pad_token_id] * (width - len(row)) + row for row in rows]
        attention = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
        with torch.inference_mode():
            outputs = self.model.generate(
                input_ids=torch.tensor(ids, device=self.device),
                attention_mask=torch.tensor(attention, device=self.device),
                **self._options,
            )
        added: list[str] = self.tokenizer.batch_decode(
            outputs[:, width:], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return added

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of a text.

        Raises:
            InvalidInput: it is no string, blank, no valid Unicode or too long.
        """
        return _encode(self.tokenizer, text, self.max_prompt_tokens)


@dataclass
class Writing:
    """The state of a text that is being written.

    Attributes:
        text: what was sent, until it is handed out with the first new piece; then empty.
        answer: the pipeline's state.
    """

    text: str
    answer: Any


class ManagedGenerationModel(ManagedModel):
    """The text generation model in a worker process, as a model of steps.

    An item is a text. Its outputs are the text with the first piece of what follows it, and then
    the other pieces: joined they are what ``predict`` returns. Each step adds a token to all texts.
    """

    def init_model(
        self,
        max_new_tokens: int = MAX_NEW_TOKENS,
        model_path: str | os.PathLike[str] | None = None,
    ) -> None:
        """Loads the model; its arguments and errors are ``TextGenerationModel``'s.

        Without a path it is that of the environment's ``MODEL``, or else the shipped one.
        """
        _check_count(max_new_tokens)
        model_path = model_path or os.environ.get("MODEL") or DEFAULT_MODEL
        source = locate(model_path, HUB_NAME)
        from service_streamer.pipelines.stepped_pipeline import SteppedPipeline

        self.model: SteppedPipeline = SteppedPipeline(self.gpu_id)
        self.model.init_model(source, "text-generation")
        self.tokenizer: Any = self.model.model.tokenizer
        self.limit = _room(self.model.model.model, model_path, max_new_tokens)
        self.parameters = {"max_new_tokens": max_new_tokens, "do_sample": False}

    def start(self, items: list[str]) -> list[Writing]:
        """Returns a state for each text.

        Raises:
            InvalidItems: some texts are bad; their errors are those of ``TextGenerationModel``.
        """
        errors: dict[int, Exception] = {}
        for position, text in enumerate(items):
            try:
                _encode(self.tokenizer, text, self.limit)
            except InvalidInput as error:
                errors[position] = error
        if errors:
            raise InvalidItems(errors)
        answers = self.model.start(
            [
                {"do": "generate", "inputs": text.rstrip(" "), "parameters": self.parameters}
                for text in items
            ]
        )
        return [Writing(text, answer) for text, answer in zip(items, answers, strict=True)]

    def step(self, states: list[Writing]) -> list[tuple[str | None, bool]]:
        """Adds a token to each text."""
        results: list[tuple[str | None, bool]] = []
        steps = self.model.step([state.answer for state in states])
        for state, (output, is_done) in zip(states, steps, strict=True):
            piece = output["text"] if output else ""
            if state.text and (piece or is_done):
                piece, state.text = _join(state.text, piece), ""
            results.append((piece or None, is_done))
        return results

    def release(self, state: Writing) -> None:
        """Frees the caches of a text."""
        self.model.release(state.answer)

    def cost(self, state: Writing) -> float:
        """Returns its tokens: ``max_batch_cost`` bounds those of a batch."""
        return self.model.cost(state.answer)

    def join_outputs(self, outputs: list[str]) -> str:
        """Returns the text with what follows it."""
        return "".join(outputs)


def _check_count(max_new_tokens: int) -> None:
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int):
        raise ValueError(f"max_new_tokens must be an int, not {max_new_tokens!r}")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be 1 or more, not {max_new_tokens}")


def _room(model: Any, model_path: str | os.PathLike[str], max_new_tokens: int) -> int:
    """The most tokens that a text may have before the model goes on with it."""
    longest: int = getattr(model.config, "max_position_embeddings", None) or 2048
    if longest <= max_new_tokens:
        raise ValueError(
            f"max_new_tokens is {max_new_tokens}, but the model {os.fspath(model_path)!r} "
            f"takes {longest} tokens at most, those of the text included"
        )
    return longest - max_new_tokens


def _encode(tokenizer: Any, text: str, limit: int) -> list[int]:
    """See ``TextGenerationModel.encode``."""
    if not isinstance(text, str):
        raise InvalidInput(f"text: must be a string, not {type(text).__name__}: {quote(text)}")
    if not text.strip():
        raise InvalidInput("text: is empty; send the beginning of a text")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidInput(
            f"text: {quote(text)} is not valid Unicode; send it without its half surrogate pair"
        ) from None
    # Models know a space as the beginning of a word: one at the end would be a word of its own.
    ids: list[int] = tokenizer(text.rstrip(" "))["input_ids"]
    if len(ids) > limit:
        raise InvalidInput(
            f"text: {quote(text)} has {len(ids)} tokens, and the limit is {limit}; shorten it"
        )
    return ids


def _join(text: str, more: str) -> str:
    return text + (more.removeprefix(" ") if text.endswith(" ") else more)


if __name__ == "__main__":
    for text in TextGenerationModel().predict(
        ["Twinkle, twinkle,", "Mary had a little", "The owl and the pussy"]
    ):
        print(text, end="\n\n")
