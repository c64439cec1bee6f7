"""Requests and answers in the form of Hugging Face's InferenceClient. Pure.

The client posts to the address that it is given, without a path. Where nothing else is said here,
its form is that of the pipelines.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .schemas import HubRequest, HubTextRequest

__all__ = ["hub_answer", "hub_parameters", "refused_field"]

#: What generates text elsewhere has these switches too. Off, they ask for nothing.
_SWITCHES = ("decoder_input_details", "details", "watermark")

#: Fields beside the parameters, which text-embeddings-inference takes.
_NEVER = ("normalize", "prompt_name", "truncation_direction", "dimensions", "encoding_format")


def refused_field(request: HubRequest | HubTextRequest) -> str | None:
    """The first field that asks for what is not offered; None if there is none."""
    if request.stream:
        return "stream"
    return next((name for name in _NEVER if getattr(request, name) is not None), None)


def hub_parameters(request: HubRequest | HubTextRequest, task: str | None) -> dict[str, Any]:
    """The parameters by the pipeline's names."""
    parameters = {**request.parameters}
    if request.truncate is not None:
        parameters.setdefault("truncation", request.truncate)
    if task == "text-generation":
        for name in _SWITCHES:
            if parameters.get(name) is False:
                del parameters[name]
        if "stop_sequences" in parameters:
            parameters.setdefault("stop", parameters.pop("stop_sequences"))
        parameters.setdefault("return_full_text", False)
    return parameters


def hub_answer(outputs: list[Any], task: str | None, *, is_one: bool) -> Any:
    """The answer for the outputs of the pipeline.

    Args:
        is_one: whether a single input was sent, and not a list.
    """
    if task == "text-classification":  # a list for each input, also for a single one
        return [each if isinstance(each, list) else [each] for each in outputs]
    if task == "zero-shot-classification":
        outputs = [_labelled(each) for each in outputs]
    return outputs[0] if is_one else outputs


def _labelled(output: Mapping[str, Any]) -> list[dict[str, Any]]:
    pairs = zip(output["labels"], output["scores"], strict=True)
    return [{"label": label, "score": score} for label, score in pairs]
