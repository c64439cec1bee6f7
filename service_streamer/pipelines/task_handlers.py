"""Which handlers compute the operations of a task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .classification import PairScorer, TextClassifier
from .embedding import FeatureExtractor, SentenceEmbedder, TokenEmbedder, sentence_settings
from .generation import Generator, PipelineGenerator
from .handlers import Handler
from .images import ImageClassifier, ImageFeatures, ObjectDetector
from .infilling import MaskFiller
from .scoring import PromptScorer
from .seq2seq import ImageDescriber, Rewriter, TextRewriter
from .sounds import SoundClassifier, SpeechRecognizer
from .tagging import TokenTagger
from .tasks import TASKS
from .text_handler import has_prefix
from .texts import ZeroShotClassifier
from .tokenizing import TOKEN_HANDLERS
from .transcribing import WHISPER, Transcriber

#: For each task its operations, and what computes them.
_HANDLERS: Mapping[str, Mapping[str, Callable[[Any], Handler]]] = {
    "audio-classification": {"predict": SoundClassifier},
    "fill-mask": {"predict": MaskFiller},
    "image-classification": {"predict": ImageClassifier},
    "image-feature-extraction": {"predict": ImageFeatures},
    "image-to-text": {"predict": ImageDescriber},
    "object-detection": {"predict": ObjectDetector},
    "text-classification": {"predict": TextClassifier},
    "text-generation": {"predict": PipelineGenerator, "generate": Generator},
    "text2text-generation": {"predict": TextRewriter, "generate": Rewriter},
    "token-classification": {"predict": TokenTagger},
}


def handlers_of(
    pipeline: Any, read_json: Callable[[str], Any], batch_size: int
) -> tuple[dict[str, Handler], str]:
    """The handlers of a model's operations, and why it has no sentence embeddings; "" if it has.

    Args:
        pipeline: of transformers, or of ``bare_pipeline``.
        read_json: reads a file of the model.
        batch_size: the streamer's.
    """
    handlers, obstacle = _handlers_of(pipeline, read_json, batch_size)
    if TASKS[pipeline.task].takes == "text":
        handlers |= {do: handler(pipeline) for do, handler in TOKEN_HANDLERS.items()}
    return handlers, obstacle


def _handlers_of(
    pipeline: Any, read_json: Callable[[str], Any], batch_size: int
) -> tuple[dict[str, Handler], str]:
    """Those of the model itself."""
    task, model = pipeline.task, pipeline.model
    if task == "zero-shot-classification":
        return {"predict": ZeroShotClassifier(pipeline, batch_size)}, ""
    if task == "automatic-speech-recognition":
        is_whisper = type(model).__name__ == WHISPER
        return {"predict": (Transcriber if is_whisper else SpeechRecognizer)(pipeline)}, ""
    if task != "feature-extraction":
        handlers = {do: handler(pipeline) for do, handler in _HANDLERS[task].items()}
        if task == "text-classification" and model.config.num_labels == 1:
            handlers["rerank"] = PairScorer(pipeline)
        generator = handlers.get("generate")
        if isinstance(generator, Generator) and not has_prefix(pipeline):
            handlers["score"] = PromptScorer(generator)
        return handlers, ""
    handlers = {"predict": FeatureExtractor(pipeline), "embed_all": TokenEmbedder(pipeline)}
    settings = sentence_settings(read_json)
    if settings.obstacle:
        return handlers, settings.obstacle
    return {**handlers, "embed": SentenceEmbedder(pipeline, settings)}, ""
