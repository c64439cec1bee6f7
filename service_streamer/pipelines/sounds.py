"""The sound tasks: classification on tensors, speech recognition through transformers' pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import InvalidInput
from .handlers import Handler
from .inputs import read_audio
from .labels import Labels, default_function, rank
from .requests import Request, call_pipeline
from .rows import RowHandler

#: Parameters that say how text is generated.
_OF_WHISPER = frozenset(("language", "task", "num_beams"))


class SoundClassifier(RowHandler):
    """ "predict" of audio-classification.

    Sounds whose features have the same shape share a batch: padding would change some models'
    results.

    Args:
        pipeline: a pipeline of transformers.
    """

    has_buckets = False  # for many models each length is a shape of its own

    def __init__(self, pipeline: Any) -> None:
        super().__init__(pipeline)
        config = pipeline.model.config
        self.labels = Labels(config, default_function(config, of_one="softmax"))

    def read(self, request: Request) -> Mapping[str, Any]:
        extractor = self.pipeline.feature_extractor
        samples = read_sound(request.inputs, self.pipeline)
        request.inputs = None
        features = extractor(samples, sampling_rate=extractor.sampling_rate, return_tensors="pt")
        return {name: each[0] for name, each in features.items()}

    def plan(self, requests: list[Request]) -> Any:
        return self.labels.plan(requests)

    def compute(self, inputs: Mapping[str, Any], plan: Any) -> Any:
        """Scores and numbers of the best labels."""
        return rank(self.run(inputs)["logits"], *plan)

    def results(self, requests: list[Request], outputs: Any) -> list[Any]:
        return self.labels.answers(requests, outputs)


class SpeechRecognizer(Handler):
    """ "predict" of automatic-speech-recognition.

    Sounds of the same length share a batch: padding would change some models' results.

    Args:
        pipeline: a pipeline of transformers.
    """

    def __init__(self, pipeline: Any) -> None:
        self.pipeline = pipeline

    def prepare(self, request: Request) -> None:
        """Decode the sound. Raises InvalidInput."""
        for name in _OF_WHISPER & request.parameters.keys():
            raise InvalidInput(f"parameters.{name}: is for Whisper models; leave it out")
        request.inputs = read_sound(request.inputs, self.pipeline)
        request.group_by(request.parameters, len(request.inputs))

    def forward(self, batch: list[Request]) -> list[Any]:
        """Compute requests of one group, in one call of the pipeline."""
        inputs = [request.inputs for request in batch]
        return call_pipeline(self.pipeline, inputs, batch[0].parameters, len(inputs))


def read_sound(value: object, pipeline: Any) -> Any:
    """The samples of a sound. Raises InvalidInput."""
    import torch

    samples = read_audio(value, pipeline.feature_extractor.sampling_rate)
    frames = getattr(pipeline.model, "_get_feat_extract_output_lengths", None)
    if frames is not None and int(frames(torch.tensor([len(samples)]))) < 1:
        raise InvalidInput(
            f"inputs: the sound has {len(samples)} samples, too few for the model; "
            "send a longer one"
        )
    return samples
