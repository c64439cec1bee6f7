"""What a pipeline is and can do, and an example that it accepts."""

from __future__ import annotations

import base64
import io
import math
import struct
import wave
from typing import Any

from .tasks import GENERATING, TASKS

#: The task whose answers are vectors. The description says of how many numbers, and by that also
#: that an item may ask for arrays of them.
_EMBEDS = "feature-extraction"

#: For tasks that require labels.
_LABELS = ["sports", "politics"]


def describe_pipeline(pipeline: Any, name: str, operations: list[str]) -> dict[str, Any]:
    """The model's description, without the limits and the example, which depends on them.

    Args:
        pipeline: a transformers pipeline.
        name: the model's name for users.
        operations: supported operations.
    """
    task, model = pipeline.task, pipeline.model
    labels = getattr(model.config, "id2label", None) if TASKS[task].has_labels else None
    return {
        "task": task,
        "model": name,
        "mask_token": pipeline.tokenizer.mask_token if task == "fill-mask" else None,
        "operations": operations,
        "takes_parameters": any(TASKS[task].parameters_of(do) for do in operations),
        "labels": [str(labels[at]) for at in sorted(labels)] if labels else None,
        "candidate_labels_required": "candidate_labels" in TASKS[task].parameters,
        "max_tokens": None,
        "max_sound_seconds": None,
        "vector_size": getattr(model.config, "hidden_size", None) if task == _EMBEDS else None,
        "chats": task == "text-generation" and bool(pipeline.tokenizer.chat_template),
        "device": str(pipeline.device),
        "attention": getattr(model.config, "_attn_implementation", None),
    }


def example_of(pipeline: Any, limit: int | None) -> dict[str, Any]:
    """Cheap inputs and parameters that every model of the task and token limit accepts."""
    task = pipeline.task
    parameters: dict[str, Any] = {}
    inputs: str
    if TASKS[task].takes == "image":
        inputs = _example_image()
    elif TASKS[task].takes == "audio":
        inputs = _example_sound(pipeline.feature_extractor.sampling_rate)
    elif task == "fill-mask":
        inputs = f"Happy birthday to {pipeline.tokenizer.mask_token}."
    else:
        inputs = TASKS[task].example
    pairs: list[tuple[str, ...]] = [()]  # what a text is read with
    if "candidate_labels" in TASKS[task].parameters:
        is_roomy = limit is None or limit >= 32  # for more than a label and a word
        template = "This example is {}." if is_roomy else "{}"
        parameters |= {"candidate_labels": _LABELS, "hypothesis_template": template}
        pairs = [(template.format(label),) for label in _LABELS]
    if task in GENERATING:
        parameters |= {"max_new_tokens": 2, "do_sample": False}
    if TASKS[task].takes == "text" and limit is not None:
        room = limit - parameters.get("max_new_tokens", 0)
        inputs = _shortened(inputs, pairs, room, pipeline.tokenizer)
    return {"inputs": inputs, "parameters": parameters}


def _shortened(text: str, pairs: list[tuple[str, ...]], room: int, tokenizer: Any) -> str:
    """A text that has no more tokens than there is room for, if that is possible."""
    mask = tokenizer.mask_token
    shortest = mask if mask and mask in text else text[0]
    while text != shortest and any(
        len(tokenizer(text, *each, verbose=False)["input_ids"]) > room for each in pairs
    ):
        text = shortest if shortest == mask else text.rpartition(" ")[0] or text[:-1]
    return text


def _example_image() -> str:
    """A little picture: a gradient from blue to orange."""
    from PIL import Image  # type: ignore[import-not-found, unused-ignore]

    image = Image.new("RGB", (64, 64))
    image.putdata([(4 * x, 2 * (x + y), 255 - 4 * x) for y in range(64) for x in range(64)])
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _example_sound(rate: int) -> str:
    """A tenth of a second of the concert pitch."""
    file = io.BytesIO()
    samples = [round(8000 * math.sin(at * 880 * math.pi / rate)) for at in range(rate // 10)]
    with wave.open(file, "wb") as sound:
        sound.setparams((1, 2, rate, 0, "NONE", ""))
        sound.writeframes(struct.pack(f"<{len(samples)}h", *samples))
    return "data:audio/wav;base64," + base64.b64encode(file.getvalue()).decode()
