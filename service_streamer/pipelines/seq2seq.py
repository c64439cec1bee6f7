"""Tasks of models with an encoder and a decoder: a text, or an image, becomes a text.

transformers has no pipelines for them any more. The results have the forms that those had.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import InvalidInput
from .images import upright
from .inputs import read_image
from .requests import Request
from .tasks import MOST_NEW_TOKENS
from .text_handler import GivenText, PromptedText
from .texts import prepare_padding


def bare_pipeline(task: str, model: Any, device: Any, parts: Mapping[str, Any]) -> Any:
    """What a pipeline of transformers holds, for a task that transformers has none for.

    Args:
        device: a ``torch.device``; None for a model that has been placed.
        parts: tokenizer and image processor, by the names that pipelines give them.
    """
    from transformers import Pipeline

    class BarePipeline(Pipeline):  # type: ignore[misc, unused-ignore]
        _pipeline_calls_generate = True

        def _sanitize_parameters(self, **_: Any) -> Any:
            return {}, {}, {}

        def preprocess(self, *_: Any, **__: Any) -> Any:
            raise NotImplementedError

        def _forward(self, *_: Any, **__: Any) -> Any:
            raise NotImplementedError

        def postprocess(self, *_: Any, **__: Any) -> Any:
            raise NotImplementedError

    return BarePipeline(model=model, task=task, device=device, **parts)


class _Decoder(GivenText):
    """Texts of a decoder, whose tokens are not those of the inputs."""

    def __init__(self, pipeline: Any) -> None:
        super().__init__(pipeline)
        self._most = _most_positions(pipeline.model)

    def room(self, request: Request) -> int:  # noqa: ARG002
        return MOST_NEW_TOKENS if self._most is None else self._most - 1

    def beyond(self, request: Request, room: int) -> str:  # noqa: ARG002
        return f"the model's texts have at most {room} tokens"

    def rows_of(self, request: Request, config: Any) -> tuple[list[int], Any]:
        start: list[int] = config._decoder_start_token_tensor.reshape(-1).tolist()
        return start, request.encoded

    def _begun(self, request: Request) -> int:  # noqa: ARG002
        return 1  # the decoder's start

    def records(self, request: Request, rows: list[list[int]]) -> list[dict[str, Any]]:
        """``[{"generated_text": ...}, ...]`` of these rows of new tokens."""
        stops = request.parameters.get("stop", ())
        return [{"generated_text": self._ended(row, stops)["text"]} for row in rows]


class Rewriter(_Decoder, PromptedText):
    """ "generate" of text2text-generation: texts for texts, with finish reasons.

    Args:
        pipeline: of ``bare_pipeline``.
    """

    side = "right"

    def read(self, request: Request) -> tuple[Any, ...]:
        super().read(request)
        if self.limit is not None and request.tokens > self.limit:
            raise InvalidInput(
                f"inputs: the text has {request.tokens} tokens, and the limit is {self.limit}; "
                "shorten it"
            )
        return ()

    def encoder_tokens(self, request: Request) -> list[int]:
        tokens: list[int] = request.encoded
        return tokens

    def forward(self, batch: list[Request]) -> list[Any]:
        """Compute requests of one group, in one call of the model."""
        return self.texts_of(batch, goes_on=False)


class TextRewriter(Rewriter):
    """ "predict" of text2text-generation: ``[{"generated_text": ...}, ...]``."""

    def forward(self, batch: list[Request]) -> list[Any]:
        """Compute requests of one group, in one call of the model."""
        return [
            [{"generated_text": each["text"]} for each in row] for row in super().forward(batch)
        ]

    def result(self, request: Request, rows: list[list[int]]) -> Any:
        return self.records(request, rows)


class ImageDescriber(_Decoder):
    """ "predict" of image-to-text: ``[{"generated_text": ...}, ...]``.

    Args:
        pipeline: of ``bare_pipeline``.
    """

    def __init__(self, pipeline: Any) -> None:
        super().__init__(pipeline)
        prepare_padding(pipeline.model, self.tokenizer, "right")

    def read(self, request: Request) -> tuple[Any, ...]:
        image = upright(read_image(request.inputs))
        request.inputs = None
        features = self.pipeline.image_processor(images=[image], return_tensors="pt")
        request.encoded = features["pixel_values"][0]
        return tuple(request.encoded.shape)

    def forward(self, batch: list[Request]) -> list[Any]:
        """Compute requests of one group, in one call of the model."""
        import torch

        model = self.pipeline.model
        pixels = torch.stack([request.encoded for request in batch])
        found = self._generated(batch, 1, pixel_values=pixels.to(model.device, model.dtype))
        return [self.records(request, rows) for request, rows in zip(batch, found, strict=True)]

    def result(self, request: Request, rows: list[list[int]]) -> Any:
        return self.records(request, rows)

    def example(self) -> Any:
        """An image, as the encoder reads it."""
        from PIL import Image  # type: ignore[import-not-found, unused-ignore]

        image = Image.new("RGB", (64, 64))
        return self.pipeline.image_processor(images=[image], return_tensors="pt")["pixel_values"][0]


def _most_positions(model: Any) -> int | None:
    """Upper bound on the tokens of the decoder; None without a limit."""
    config = model.config.get_text_config(decoder=True)
    found = [getattr(config, name, None) for name in _POSITIONS]
    return min((each for each in found if isinstance(each, int) and each > 1), default=None)


#: How decoders call the number of their positions. T5's ``n_positions`` is of no effect.
_POSITIONS = ("max_position_embeddings", "max_target_positions")
