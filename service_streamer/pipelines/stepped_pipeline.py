"""A transformers pipeline as a model of steps: each step adds a token to every text.

Requests with parameters of their own share each step. A text that is over makes place at once, and
a new one begins at the next step. Requests that are no texts take one step.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from ..errors import InvalidInput, InvalidItems
from ..managed_model import ManagedModel
from .answers import Answer, Resumed, ids_of, joined_outputs, whole_output
from .cached_rows import GeneratedRow
from .handlers import portable, portable_errors
from .loop_check import RowLoop, fastest_loop
from .model import PipelineModel
from .requests import Request
from .row_sampling import TokenChoice, choose
from .sizes import item_length
from .structure import Structures
from .text_handler import BY_STEPS, TextHandler, has_prefix
from .text_pieces import TextDecoder

#: Tokens of all beams of a search: no other text of the worker gets one until it is over. Enough
#: for what the settings of known models ask for, such as 6 beams of 512 tokens. Arbitrary.
_MOST_SEARCHED = 8192


class WholeAnswer:
    """The state of a request that is computed in one step."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.output: dict[str, Any] | None = None


class SteppedPipeline(ManagedModel):
    """Serves a transformers model, as ``PipelineModel`` does, with the same items and results.

    Texts are generated step by step. Outputs are described in ``answers``; ``predict`` and
    ``submit`` get the results of ``PipelineModel``.

    Attributes:
        whole: the ``PipelineModel``.
        loop: adds tokens to rows; None for tasks that generate no texts, and for the few models
            that cannot do so step by step: each of their answers is one step.
    """

    length = staticmethod(item_length)

    def init_model(
        self,
        model: str | os.PathLike[str] | None = None,
        task: str | None = None,
        *,
        batch_size: int = 64,
        paged: bool | None = None,
        **options: Any,
    ) -> None:
        """Load the model.

        Args:
            model, task, options: of ``PipelineModel.init_model``.
            batch_size: the streamer's: maximum number of states.
            paged: whether caches are kept in pages, where that computes what the model computes.
                None does so for FlashAttention, whose kernels read pages. Other attention reads
                all pages for each text, and is faster with padding.

        Raises:
            Exception: as ``PipelineModel.init_model``.
        """
        self.whole = PipelineModel(self.gpu_id)
        self.whole.init_model(model, task, batch_size=batch_size, **options)
        self.model = self.whole.model
        self.loop: RowLoop | None = None
        generators = [
            handler for handler in self.whole.handlers.values() if isinstance(handler, TextHandler)
        ]
        if generators:
            network = self.model.model
            size = network.get_output_embeddings().weight.shape[0]
            self.decoder = TextDecoder(self.model.tokenizer)
            self.structures = Structures(self.model.tokenizer, generators[0].end_tokens(), size)
            self.loop = fastest_loop(
                network, batch_size, generators[0].limit, paged, generators[0].example()
            )
        for handler in generators:
            handler.by_steps = self.loop is not None

    def describe(self) -> dict[str, Any]:
        return self.whole.describe()

    def start(self, items: list[Any]) -> list[Any]:
        """One state for each item.

        Raises:
            InvalidItems: some of them are invalid; nothing was computed.
        """
        with portable_errors():
            plain = [item.item if isinstance(item, Resumed) else item for item in items]
            requests = self.whole.checked(plain)
            states: list[Any] = []
            wrong: dict[int, Exception] = {}
            for position, (item, request) in enumerate(zip(items, requests, strict=True)):
                ids = item.ids if isinstance(item, Resumed) else ()
                try:
                    states.append(self._started(request, ids))
                except InvalidInput as error:
                    wrong[position] = error
            if wrong:
                raise InvalidItems(wrong)
            return states

    def _started(self, request: Request, ids: Sequence[list[int]]) -> Answer | WholeAnswer:
        handler = self.whole.handlers.get(request.do)
        if isinstance(handler, TextHandler) and self.loop is not None:
            beginning = handler.begin(request)
            if beginning is not None:
                return Answer(handler, request, beginning, self.structures, self.decoder, ids)
            _check_whole(request, handler.pipeline)
        return WholeAnswer(request)

    def step(self, states: list[Any]) -> list[tuple[Any, bool]]:
        """Add a token to each text; compute other requests.

        The prompts of new texts are computed here, some of them in each step. The others get no
        output until it is their turn.

        Args:
            states: the oldest first.

        Raises:
            InvalidItems: some texts failed in the step before; nothing was computed.
        """
        with portable_errors():
            answers = [each for each in states if isinstance(each, Answer)]
            failed = {
                position: portable(each.failure)
                for position, each in enumerate(states)
                if isinstance(each, Answer) and each.failure is not None
            }
            if failed:
                raise InvalidItems(failed)
            self._compute([each for each in states if isinstance(each, WholeAnswer)])
            self._advance([each for each in answers if not each.is_done])
            for each in answers:
                each.finish()
            # Nothing raises from here on: a step that raises is taken again, without these outputs.
            return [_pair(each) for each in states]

    def _compute(self, answers: list[WholeAnswer]) -> None:
        waiting = [each for each in answers if each.output is None]
        if waiting:
            results = self.whole.compute([each.request for each in waiting])
            for each, result in zip(waiting, results, strict=True):
                each.output = whole_output(result, is_text=each.request.do == "generate")

    def _advance(self, answers: list[Answer]) -> None:
        owners = {id(row): answer for answer in answers for row in answer.rows}
        rows = [row for answer in answers for row in answer.rows]
        if not rows or self.loop is None:
            return
        choices: dict[int, TokenChoice] = {}

        def chosen(logits: Any, ready: list[GeneratedRow]) -> list[int]:
            found = choose(logits, ready)
            choices.update(zip(map(id, ready), found, strict=True))
            return [choice.token for choice in found]

        ready = self.loop.advance(rows, chosen)
        self.loop.drop([row for row in ready if owners[id(row)].add(row, choices[id(row)])])

    def release(self, state: Any) -> None:
        """Free the caches of a state."""
        if isinstance(state, Answer) and self.loop is not None:
            self.loop.drop([text.row for text in state.texts])

    def cost(self, state: Any) -> float:
        """Number of tokens that the caches of a state hold, without padding."""
        if isinstance(state, Answer):
            return float(sum(len(row.tokens) + row.encoded_tokens for row in state.rows))
        return float(max(1, state.request.tokens))

    def join_outputs(self, outputs: list[Any]) -> Any:
        """What ``PipelineModel`` returns for the item."""
        return joined_outputs(outputs)

    def resume(self, item: Any, outputs: list[Any]) -> Any:
        """The item that goes on where these outputs ended: with the same tokens, if it has a seed.

        Args:
            item: as ``start`` got it, which may be such an item itself.
            outputs: all that it gave, from the first item on.
        """
        first = item.item if isinstance(item, Resumed) else item
        return Resumed(first, ids_of(outputs)) if outputs else first


def _pair(state: Answer | WholeAnswer) -> tuple[Any, bool]:
    """What ``step`` returns for a state."""
    if isinstance(state, WholeAnswer):
        return state.output, True
    if state.failure is not None:
        return None, False  # the next step names it
    return state.take(), state.is_done


def _check_whole(request: Request, pipeline: Any) -> None:
    """Check a request that cannot be computed step by step.

    Args:
        request: which its handler's ``prepare`` has checked.
        pipeline: of transformers.

    Raises:
        InvalidInput: it has a parameter that needs steps, or holds up all others too long.
    """
    parameters = request.parameters
    defaults = pipeline.model.generation_config
    beams = parameters.get("num_beams", defaults.num_beams) or 1
    for name in BY_STEPS:
        if name not in parameters:
            continue
        why, out = "this model's generation_config.json asks for a search, such as by beams", name
        if has_prefix(pipeline):
            why = "this model's prompts have a text before them, and its answers come as a whole"
        elif parameters.get("num_beams", 1) > 1:
            why, out = "num_beams asks for a search by beams", f"num_beams or {name}"
        raise InvalidInput(f"parameters.{name}: {why}; leave {out} out")
    asked = parameters.get("max_new_tokens")
    texts = parameters.get("num_return_sequences", defaults.num_return_sequences) or 1
    if asked is not None and beams > 1 and beams * texts * asked > _MOST_SEARCHED:
        raise InvalidInput(
            f"parameters.max_new_tokens: must be at most {_MOST_SEARCHED // (beams * texts)} for "
            f"{beams} beams and {texts} texts, since all other texts wait for such a search; not "
            f"{asked}"
        )
