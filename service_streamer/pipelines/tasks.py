"""The tasks that can be served, and what each request may set. Tables: no torch, no transformers.

Only what is named here reaches a pipeline. A pipeline itself takes many more keywords, and some of
them would let a stranger choose files, devices or batch sizes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..errors import InvalidInput
from .parameters import Parameter, check_unicode, quote

__all__ = [
    "ALIASES",
    "MOST_NEW_TOKENS",
    "TASKS",
    "Task",
    "check_parameters",
    "parameter_schemas",
    "parse_item",
]

#: The most tokens that a request may have generated. Arbitrary: a batch takes as long as its
#: longest answer, and 4096 tokens are minutes.
MOST_NEW_TOKENS = 4096

_MOST_SEQUENCES = 16
_MOST_TEXTS = 256


class Task(NamedTuple):
    """One that can be served.

    Attributes:
        takes: what an input is: "text", "image" or "audio".
        parameters: of its "predict".
        operations: further ones, with their parameters.
    """

    takes: str
    parameters: Mapping[str, Parameter]
    operations: Mapping[str, Mapping[str, Parameter]] = {}

    def parameters_of(self, do: str) -> Mapping[str, Parameter] | None:
        """Those of an operation; None where the task has no such operation."""
        return self.parameters if do == "predict" else self.operations.get(do)


_TRUNCATION = {
    "truncation": Parameter("boolean", "Cut a text that is too long, instead of refusing it.")
}
_FUNCTION = {
    "function_to_apply": Parameter(
        "string", "What turns the model's numbers into scores; chosen by the model if left out.",
        choices=("sigmoid", "softmax", "none"),
    )
}  # fmt: skip
_TOP_LABELS = {"top_k": Parameter("integer", "How many labels to return.", 1, 10_000)}
_GENERATION = {
    "max_new_tokens": Parameter("integer", "The most tokens to generate.", 1, MOST_NEW_TOKENS),
    "temperature": Parameter(
        "number", "How freely to sample; 0 takes the likeliest token each time.", 0, 100
    ),
    "top_p": Parameter(
        "number", "Sample among the likeliest tokens that have this probability together.",
        high=1, above=0,
    ),
    "top_k": Parameter(
        "integer", "Sample among so many of the likeliest tokens; 0 for all.", 0, 1_000_000
    ),
    "do_sample": Parameter("boolean", "Sample, instead of taking the likeliest token each time."),
    "num_return_sequences": Parameter(
        "integer", "How many answers to return; more than one has to be sampled.",
        1, _MOST_SEQUENCES,
    ),
    "repetition_penalty": Parameter(
        "number", "Above 1 makes tokens that are there already less likely.", 0.1, 10
    ),
    "stop": Parameter(
        "strings", "Stop where one of these appears; it is left out of the answer.", high=16
    ),
    "seed": Parameter(
        "integer", "Makes a sampled answer repeatable on the same machine.", 0, 2**63 - 1
    ),
}  # fmt: skip

TASKS: Mapping[str, Task] = {
    "fill-mask": Task(
        "text",
        {
            "top_k": Parameter("integer", "How many words to return for each mask.", 1, 1000),
            "targets": Parameter(
                "strings", "Score these words only, instead of the whole vocabulary.",
                high=_MOST_TEXTS,
            ),
            **_TRUNCATION,
        },
    ),
    "text-classification": Task(
        "text",
        {
            "top_k": Parameter(
                "integer", "How many labels to return; null for all of them.", 1, 10_000,
                null="all labels",
            ),
            **_FUNCTION,
            **_TRUNCATION,
        },
    ),
    "token-classification": Task(
        "text",
        {
            "aggregation_strategy": Parameter(
                "string", "How tokens are joined to entities; none returns every token.",
                choices=("none", "simple", "first", "average", "max"),
            ),
            "ignore_labels": Parameter(
                "strings", "Labels to leave out; 'O' if not given.", high=_MOST_TEXTS
            ),
            **_TRUNCATION,
        },
    ),
    "feature-extraction": Task("text", _TRUNCATION, {"embed": _TRUNCATION}),
    "text-generation": Task(
        "text",
        {
            **_GENERATION,
            "return_full_text": Parameter("boolean", "Return the prompt, too; true if not given."),
        },
        {"generate": _GENERATION},
    ),
    "zero-shot-classification": Task(
        "text",
        {
            "candidate_labels": Parameter(
                "strings", "The labels to choose from, as a list or separated by commas.",
                high=_MOST_TEXTS,
            ),
            "hypothesis_template": Parameter(
                "string", "The sentence that is tested, with {} in place of the label."
            ),
            "multi_label": Parameter("boolean", "Whether several labels may be right."),
            **_TRUNCATION,
        },
    ),
    "image-classification": Task("image", {**_TOP_LABELS, **_FUNCTION}),
    "image-feature-extraction": Task("image", {}),
    "object-detection": Task(
        "image", {"threshold": Parameter("number", "The least score of an object.", 0, 1)}
    ),
    "audio-classification": Task("audio", {**_TOP_LABELS, **_FUNCTION}),
    "automatic-speech-recognition": Task(
        "audio",
        {
            "return_timestamps": Parameter(
                "string", "Say when each character or word was spoken.", choices=("char", "word")
            )
        },
    ),
}  # fmt: skip

#: Other names of tasks, as transformers has them.
ALIASES = {"ner": "token-classification", "sentiment-analysis": "text-classification"}


def parameter_schemas(task: str, do: str = "predict") -> dict[str, dict[str, Any]]:
    """The JSON schema of each parameter of a task's operation; none where there is no such."""
    known = TASKS.get(ALIASES.get(task, task))
    parameters = known.parameters_of(do) if known else None
    return {name: parameter.schema() for name, parameter in (parameters or {}).items()}


def check_parameters(task: str, do: str, parameters: object) -> dict[str, Any]:
    """The parameters that are given, each checked, in the order of their names.

    Null is "not given", except where the table says what it means.

    Raises:
        InvalidInput: one is unknown, of another type or out of range.
    """
    table = TASKS[task].parameters_of(do) or {}
    if not isinstance(parameters, Mapping):
        raise InvalidInput(f"parameters: must be an object; not {quote(parameters)}")
    checked: dict[str, Any] = {}
    for name in sorted(parameters, key=str):
        if name not in table:
            raise InvalidInput(f"parameters.{_shown(name)}: is not known here; {_known(table)}")
        value = parameters[name]
        if name == "candidate_labels" and isinstance(value, str):  # as the pipeline takes them
            value = value.split(",")
        if value is not None:
            checked[name] = table[name].check(name, value)
        elif table[name].null:
            checked[name] = None
    if "candidate_labels" in table:
        _check_labels(checked)
    return checked


def _known(table: Mapping[str, Parameter]) -> str:
    return f"there are {', '.join(sorted(table))}" if table else "this operation takes none"


def _check_labels(parameters: dict[str, Any]) -> None:
    """Those of a zero-shot task, which it cannot do without."""
    stripped = (label.strip() for label in parameters.get("candidate_labels", ()))
    labels = tuple(dict.fromkeys(filter(None, stripped)))
    if not labels:
        raise InvalidInput(
            "parameters.candidate_labels: name the labels to choose from, such as "
            '["sports", "politics"]'
        )
    parameters["candidate_labels"] = labels
    template = parameters.get("hypothesis_template", "{}")
    # str.format fills it: more than one plain {} would give strangers its whole language, in
    # which "{:>9999999999}" is ten gigabytes.
    if template.count("{}") != 1 or re.search(r"[{}]", template.replace("{}", "")):
        raise InvalidInput(
            "parameters.hypothesis_template: must have {} in place of the label, once, and no "
            f"other braces; not {quote(template)}"
        )
    check_unicode("parameters.hypothesis_template", template)


def parse_item(item: object) -> tuple[str, Any, Any]:
    """What an item asks for: operation, inputs, parameters. What is no request is an input."""
    if isinstance(item, dict) and item.keys() == {"do", "inputs", "parameters"}:
        do, parameters = item["do"], item["parameters"]
        return str(do), item["inputs"], {} if parameters is None else parameters
    return "predict", item, {}


def _shown(name: object) -> str:
    text = str(name).encode("ascii", "backslashreplace").decode()
    return text if len(text) <= 60 else text[:57] + "..."
