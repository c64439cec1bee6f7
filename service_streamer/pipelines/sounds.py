"""The sound tasks: classification on tensors, speech recognition through transformers' pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import InvalidInput
from .handlers import Handler
from .inputs import read_audio
from .requests import Request, call_pipeline
from .rows import LabelHandler, default_function

#: Parameters that say how text is generated.
_OF_WHISPER = frozenset(("language", "task", "num_beams"))

#: How feature extractors name the size to which they cut or pad every sound: Whisper's and AST's.
_SIZES = ("n_samples", "max_length")

#: Seconds of sound of a forward pass, by default. On a CPU wav2vec 2.0 takes 16 MB for a second in
#: float32, 22 MB with layer norm between its convolutions: 1 to 1.3 GB for 60 s, 3.8 GB for 240 s.
#: And batches do not pay there: 4 sounds of 30 s took 28.4 s of processor time, one took 7.2 s.
CPU_SECONDS = 60
GPU_SECONDS = 600  # the longest sound; a worker notices if its GPU has too little memory

#: Seconds of context on both sides of a piece. As transformers has for pieces of 30 s.
_STRIDE = 5.0


class SoundClassifier(LabelHandler):
    """ "predict" of audio-classification.

    Sounds whose features have the same shape share a batch: padding would change some models'
    results.

    Args:
        pipeline: a pipeline of transformers.
    """

    has_buckets = False  # for many models each length is a shape of its own

    def __init__(self, pipeline: Any) -> None:
        super().__init__(pipeline)
        self.function = default_function(pipeline.model.config, of_one="softmax")
        self.computes_whole = not any(hasattr(pipeline.feature_extractor, name) for name in _SIZES)

    def read(self, request: Request) -> Mapping[str, Any]:
        extractor = self.pipeline.feature_extractor
        samples = read_sound(request.inputs, self.pipeline)
        request.inputs = None
        request.tokens = len(samples) if self.computes_whole else 0
        features = extractor(samples, sampling_rate=extractor.sampling_rate, return_tensors="pt")
        return {name: each[0] for name, each in features.items()}


class SpeechRecognizer(Handler):
    """ "predict" of automatic-speech-recognition.

    Sounds of the same length share a batch: padding would change some models' results. A sound
    that is too long for a forward pass is computed in pieces by models of CTC, if they say how many
    samples an output has.

    Args:
        pipeline: a pipeline of transformers.
    """

    def __init__(self, pipeline: Any) -> None:
        self.pipeline = pipeline
        has_pieces = hasattr(pipeline.model.config, "inputs_to_logits_ratio")
        self.computes_whole = not has_pieces or "ctc" not in pipeline.type

    def prepare(self, request: Request) -> None:
        """Decode the sound. Raises InvalidInput."""
        for name in _OF_WHISPER & request.parameters.keys():
            raise InvalidInput(f"parameters.{name}: is for Whisper models; leave it out")
        request.inputs = read_sound(request.inputs, self.pipeline)
        request.tokens = len(request.inputs)
        request.group_by(request.parameters, len(request.inputs))

    def forward(self, batch: list[Request]) -> list[Any]:
        """Compute requests of one group, in one call of the pipeline."""
        inputs, options = [request.inputs for request in batch], batch[0].parameters
        most = self.buckets.most
        if most is not None and len(inputs[0]) > most:
            seconds = most / self.pipeline.feature_extractor.sampling_rate
            stride = min(_STRIDE, seconds / 6)
            options = {**options, "chunk_length_s": seconds, "stride_length_s": stride}
        return call_pipeline(self.pipeline, inputs, options, len(inputs))


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
