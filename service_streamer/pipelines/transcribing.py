"""Speech recognition by Whisper, whose texts can come token by token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import InvalidInput
from .requests import Request, call_pipeline, quote
from .row_sampling import sampling_of
from .sounds import SpeechRecognizer, read_sound
from .text_handler import Beginning, TextHandler
from .texts import prepare_padding

WHISPER = "WhisperForConditionalGeneration"

#: Bounds that a text must keep, or it is generated again with another temperature.
_THRESHOLDS = ("no_speech_threshold", "logprob_threshold", "compression_ratio_threshold")


class Transcriber(SpeechRecognizer, TextHandler):
    """ "predict" of automatic-speech-recognition by Whisper.

    A sound of up to 30 seconds is one text. A longer one is many, each of which begins where the
    times in the one before it say; that, and everything else with times, ``generate`` does.

    Args:
        pipeline: a pipeline of transformers.
    """

    def __init__(self, pipeline: Any) -> None:
        super().__init__(pipeline)
        self.computes_whole = False  # ``generate`` cuts sounds
        prepare_padding(pipeline.model, pipeline.tokenizer, "right")  # pipelines ask for it

    def prepare(self, request: Request) -> None:
        """Decode the sound, and check the parameters. Raises InvalidInput."""
        sent = request.parameters
        if sent.get("return_timestamps") == "char":
            raise InvalidInput(
                "parameters.return_timestamps: this model knows the times of words; send 'word'"
            )
        self._check_language(sent)
        request.inputs = read_sound(request.inputs, self.pipeline)
        request.group_by(sent, len(request.inputs))

    def _check_language(self, sent: Mapping[str, Any]) -> None:
        from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

        if self.pipeline.device.type == "meta":
            return  # in a preprocess process, which has the model's config alone
        defaults = self.pipeline.model.generation_config
        known = getattr(defaults, "lang_to_id", None)
        for name in ("language", "task") if not known else ():
            if name in sent:
                raise InvalidInput(
                    f"parameters.{name}: this model is for one language; leave {name} out"
                )
        language = sent.get("language", "en").lower()
        code = TO_LANGUAGE_CODE.get(language, language)
        if known and "language" in sent and f"<|{code}|>" not in known:
            raise InvalidInput(
                f"parameters.language: this model does not know {quote(sent['language'])}; send a "
                "code such as 'fr', or leave it out"
            )

    def forward(self, batch: list[Request]) -> list[Any]:
        """Compute requests of one group, in one call of the pipeline."""
        parameters = dict(batch[0].parameters)
        times = parameters.pop("return_timestamps", None)
        # The model finds its way through a long sound by times alone.
        options = {"return_timestamps": times or self._is_long(batch[0]) or None}
        inputs = [request.inputs for request in batch]
        config = self.pipeline.model.config
        attention = config._attn_implementation
        try:
            found = call_pipeline(
                self.pipeline, inputs, {**options, "generate_kwargs": parameters}, len(inputs)
            )
        finally:
            config._attn_implementation = attention  # times of words need another one
        return found if times else [{"text": each["text"]} for each in found]

    def begin(self, request: Request) -> Beginning | None:
        if self._is_long(request) or request.parameters.get("return_timestamps"):
            return None
        model = self.pipeline.model
        call = self._call(request)
        config = call["generation_config"]
        if (
            any(getattr(config, name, None) is not None for name in _THRESHOLDS)
            or call["temperatures"] not in ([None], [0.0])
            or getattr(config, "return_timestamps", False)
        ):
            return None  # it may be begun again, or go on behind its last time
        prompt: list[int] = call["decoder_input_ids"][0].tolist()
        config.do_sample, config.temperature = False, 1.0
        sampling = sampling_of(model, config, len(prompt), processors=call["logits_processor"])
        if sampling is None:
            return None
        room = model.config.max_target_positions - len(prompt)
        if config.max_new_tokens is not None:
            room = min(room, config.max_new_tokens)
        elif config.max_length is not None:
            room = min(room, config.max_length - len(prompt))
        features, output = call["segment_input"][0], call.get("encoder_output")
        return Beginning(prompt, sampling, room, features, encoder_output=output)

    def result(self, request: Request, rows: list[list[int]]) -> Any:
        """The pipeline's result for this row of new tokens.

        If the row has a time, which few models write unasked, the sound is recognized again, as a
        whole. That takes long, and the step's other texts wait.
        """
        import torch

        times = getattr(self.pipeline.model.generation_config, "no_timestamps_token_id", None)
        if times is not None and any(token > times for row in rows for token in row):
            return self.forward([request])[0]  # behind a time that it may not have, it begins again
        tokens = torch.tensor(rows)
        found: dict[str, Any] = self.pipeline.postprocess([{"tokens": tokens, "is_last": True}])
        return found

    def example(self) -> Any:
        """Features of a sound."""
        import numpy

        return self._features(numpy.zeros(1600, numpy.float32))["input_features"][0]

    def _is_long(self, request: Request) -> bool:
        return len(request.inputs) > int(self.pipeline.feature_extractor.n_samples)

    def _features(self, samples: Any) -> Any:
        extractor = self.pipeline.feature_extractor
        return extractor(
            samples,
            sampling_rate=extractor.sampling_rate,
            return_tensors="pt",
            return_attention_mask=True,
        )

    def _call(self, request: Request) -> dict[str, Any]:
        """What Whisper's ``generate`` would hand to that of all models, for one sound.

        It makes the prompt, for which it may have to recognize the language, and the rules for
        tokens, and is stopped there. ``encoder_output`` is what the encoder has given if it ran.
        """
        import torch

        model = self.pipeline.model
        features = self._features(request.inputs).to(model.device)
        caught: dict[str, Any] = {}

        def catch(**options: Any) -> Any:
            caught.update(options)
            raise _Caught

        def keep(_module: Any, _inputs: Any, output: Any) -> None:
            caught["encoder_output"] = output.last_hidden_state[0]

        model.generate_with_fallback = catch
        hook = model.get_encoder().register_forward_hook(keep)
        try:
            with torch.inference_mode(), self.pipeline.device_placement():
                model.generate(
                    input_features=features["input_features"].to(model.dtype),
                    attention_mask=features["attention_mask"],
                    **self.pipeline._prepare_generate_kwargs(dict(request.parameters)),
                )
        except _Caught:
            pass
        finally:
            hook.remove()
            del model.generate_with_fallback
        return caught


class _Caught(BaseException):  # no handler of errors may take it for one
    """What was wanted is there."""
