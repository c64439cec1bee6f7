"""The tasks that can be served and their parameters. Tables: no torch, no transformers.

Only the parameters in these tables reach a pipeline. Pipelines take more keywords, some of which
would let a client choose files, devices or batch sizes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ..errors import InvalidInput
from .requests import Parameter, check_unicode, quote

#: Upper bound on a request's generated tokens. Arbitrary: a batch takes as long as its longest
#: answer, and 4096 tokens take minutes.
MOST_NEW_TOKENS = 4096

_MOST_SEQUENCES = 16
_MOST_TEXTS = 256


class Task(NamedTuple):
    """A task that can be served.

    Attributes:
        takes: type of an input: "text", "image" or "audio".
        parameters: parameters of "predict".
        operations: further operations, with their parameters. Those in ``TOKEN_OPERATIONS`` are
            of all tasks that take text.
        tables: transformers' tables of the classes of its models, in order of preference: some
            classes are in several tables.
        classes: those of its models, where a table has many others.
        loads: the class that loads its models, where transformers has no pipeline for the task.
        example: inputs that every model takes; empty where they are made for the model.
        has_labels: whether its models name labels.
        generates: whether answers are generated texts.
        compiles: whether its models can be compiled. Not those whose batches are made by
            transformers' pipelines, or have a shape for each length.
    """

    takes: str
    parameters: Mapping[str, Parameter]
    operations: Mapping[str, Mapping[str, Parameter]] = {}
    tables: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    loads: str = ""
    example: str = ""
    has_labels: bool = False
    generates: bool = False
    compiles: bool = True

    def parameters_of(self, do: str) -> Mapping[str, Parameter] | None:
        """Parameters of an operation; None if the task does not have that operation."""
        if do in TOKEN_OPERATIONS and self.takes == "text":
            return TOKEN_OPERATIONS[do]
        return self.parameters if do == "predict" else self.operations.get(do)


#: What the tokenizer of a model does without the model, and its parameters.
TOKEN_OPERATIONS: Mapping[str, Mapping[str, Parameter]] = {
    "tokenize": {
        "add_special_tokens": Parameter(
            "boolean", "Add the special tokens that the model gets with a text; true by default."
        )
    },
    "decode": {
        "skip_special_tokens": Parameter(
            "boolean", "Leave special tokens out of the text; true by default."
        )
    },
}
_TRUNCATION = {
    "truncation": Parameter("boolean", "Truncate a text that is too long instead of refusing it.")
}
_CUTTING = {
    **_TRUNCATION,
    "truncation_side": Parameter(
        "string", "Side on which a text is truncated; chosen by the tokenizer by default.",
        choices=("left", "right"),
    ),
}  # fmt: skip
_EMBEDDING = {
    **_CUTTING,
    "normalize": Parameter("boolean", "Scale the vector to length 1; true by default."),
    "prompt_name": Parameter(
        "string",
        "Which of the model's prompts comes before a text; chosen by the model by default.",
    ),
}
_FUNCTION = {
    "function_to_apply": Parameter(
        "string", "Function that turns logits into scores; chosen by the model by default.",
        choices=("sigmoid", "softmax", "none"),
    )
}  # fmt: skip
_TOP_LABELS = {"top_k": Parameter("integer", "Number of labels to return.", 1, 10_000)}
_GENERATION = {
    "max_new_tokens": Parameter(
        "integer", "Maximum number of generated tokens.", 1, MOST_NEW_TOKENS
    ),
    "temperature": Parameter(
        "number", "Sampling temperature; 0 always takes the most likely token.", 0, 100
    ),
    "top_p": Parameter(
        "number", "Sample from the most likely tokens whose probabilities add up to this.",
        high=1, above=0,
    ),
    "top_k": Parameter(
        "integer", "Sample from this many of the most likely tokens; 0 for all.", 0, 1_000_000
    ),
    "min_p": Parameter(
        "number", "Sample from tokens with at least this share of the largest probability.", 0, 1
    ),
    "typical_p": Parameter(
        "number", "Sample from the tokens nearest to the expected information that add up to this.",
        high=1, above=0,
    ),
    "do_sample": Parameter("boolean", "Sample instead of always taking the most likely token."),
    "num_return_sequences": Parameter(
        "integer", "Number of answers to return; more than one requires sampling.",
        1, _MOST_SEQUENCES,
    ),
    "repetition_penalty": Parameter(
        "number", "Values above 1 make repeated tokens less likely.", 0.1, 10
    ),
    "frequency_penalty": Parameter(
        "number", "Subtracted from a token's logit for each time that the answer has it.", -2, 2
    ),
    "presence_penalty": Parameter(
        "number", "Subtracted from a token's logit once the answer has it.", -2, 2
    ),
    "logit_bias": Parameter(
        "biases", "Added to the logits of these tokens: their numbers, with -100 to 100.",
        -100, 100,
    ),
    "stop": Parameter(
        "strings", "Stop when one of these strings appears; it is left out of the answer.", high=16
    ),
    "logprobs": Parameter(
        "integer", "Return the log probability of each token, and of so many of the likeliest.",
        0, 20,
    ),
    "json_schema": Parameter("object", "Generate JSON of this schema."),
    "regex": Parameter("string", "Generate a text that this regular expression matches."),
    "seed": Parameter(
        "integer", "Makes sampling repeatable on the same machine.", 0, 2**63 - 1
    ),
}  # fmt: skip

#: Of "generate" alone: other results are the text as far as it was wanted.
_LENGTHENED = {
    "ignore_eos": Parameter("boolean", "Go on after the end token, up to max_new_tokens."),
    "min_new_tokens": Parameter(
        "integer", "Neither an end token nor a stop string ends a text of fewer tokens.",
        0, MOST_NEW_TOKENS,
    ),
}  # fmt: skip

_SCORING = {
    "logprobs": Parameter(
        "integer", "Return so many of the likeliest tokens in place of each token.", 0, 20
    )
}

_REWRITING = {
    **_GENERATION,
    "num_beams": Parameter(
        "integer",
        "Number of beams of a search; 1 takes or draws one token after the other. Texts of a "
        "search come as a whole.",
        1, _MOST_SEQUENCES,
    ),
}  # fmt: skip

TASKS: Mapping[str, Task] = {
    "fill-mask": Task(
        "text",
        {
            "top_k": Parameter("integer", "Number of words to return per mask.", 1, 1000),
            "targets": Parameter(
                "strings", "Score only these words instead of the whole vocabulary.",
                high=_MOST_TEXTS,
            ),
            **_TRUNCATION,
        },
        tables=("MASKED_LM",),
    ),
    "text-classification": Task(
        "text",
        {
            "top_k": Parameter(
                "integer", "Number of labels to return; null for all.", 1, 10_000,
                null="all labels",
            ),
            **_FUNCTION,
            **_CUTTING,
        },
        {"rerank": _CUTTING},
        tables=("SEQUENCE_CLASSIFICATION",), has_labels=True,
        example="I have never enjoyed a rainy day as much as this one.",
    ),
    "token-classification": Task(
        "text",
        {
            "aggregation_strategy": Parameter(
                "string", "How tokens are merged into entities; none returns every token.",
                choices=("none", "simple", "first", "average", "max"),
            ),
            "ignore_labels": Parameter(
                "strings", "Labels to leave out; 'O' by default.", low=0, high=_MOST_TEXTS
            ),
            **_TRUNCATION,
        },
        tables=("TOKEN_CLASSIFICATION",), has_labels=True, example="Ada Lovelace lived in London.",
    ),
    "feature-extraction": Task(
        "text", _CUTTING, {"embed": _EMBEDDING, "embed_all": _CUTTING},
        tables=("TEXT_ENCODING",), example="A sentence to find others like it.",
    ),
    "text-generation": Task(
        "text",
        {
            **_GENERATION,
            "return_full_text": Parameter("boolean", "Also return the prompt; true by default."),
        },
        {"generate": {**_GENERATION, **_LENGTHENED}, "score": _SCORING},
        tables=("CAUSAL_LM",), generates=True, compiles=False, example="Once upon a time",
    ),
    "text2text-generation": Task(
        "text", _REWRITING, {"generate": {**_REWRITING, **_LENGTHENED}},
        tables=("SEQ_TO_SEQ_CAUSAL_LM",), loads="AutoModelForSeq2SeqLM", generates=True,
        compiles=False, example="translate English to German: The house is small.",
    ),
    "zero-shot-classification": Task(
        "text",
        {
            "candidate_labels": Parameter(
                "strings", "Labels to choose from, as a list or separated by commas.",
                high=_MOST_TEXTS,
            ),
            "hypothesis_template": Parameter(
                "string", "Sentence to test, with {} in place of the label."
            ),
            "multi_label": Parameter("boolean", "Whether several labels may apply."),
            **_TRUNCATION,
        },
        tables=("SEQUENCE_CLASSIFICATION",), compiles=False, example="The match ended two to one.",
    ),
    "image-classification": Task(
        "image", {**_TOP_LABELS, **_FUNCTION}, tables=("IMAGE_CLASSIFICATION",), has_labels=True
    ),
    "image-feature-extraction": Task("image", {}, tables=("IMAGE",)),
    "object-detection": Task(
        "image", {"threshold": Parameter("number", "Minimum score of an object.", 0, 1)},
        tables=("OBJECT_DETECTION",), has_labels=True,
    ),
    "image-to-text": Task(
        "image", _REWRITING, classes=("VisionEncoderDecoderModel",),
        loads="AutoModelForImageTextToText", generates=True, compiles=False,
    ),
    "audio-classification": Task(
        "audio", {**_TOP_LABELS, **_FUNCTION},
        tables=("AUDIO_CLASSIFICATION",), has_labels=True, compiles=False,
    ),
    "automatic-speech-recognition": Task(
        "audio",
        {
            "return_timestamps": Parameter(
                "string", "Return the time of each character or word.", choices=("char", "word")
            ),
            "language": Parameter(
                "string", "Of Whisper: language of the speech, such as fr; recognized by default."
            ),
            "task": Parameter(
                "string", "Of Whisper: translate writes down in English what is said.",
                choices=("transcribe", "translate"),
            ),
            "num_beams": Parameter(
                "integer",
                "Of Whisper: number of beams of a search, 5 by default. With 1 the text comes "
                "token by token.",
                1, _MOST_SEQUENCES,
            ),
        },
        tables=("CTC", "SPEECH_SEQ_2_SEQ"), compiles=False,
    ),
}  # fmt: skip

#: Other names of tasks, transformers' and the hub's.
ALIASES = {
    "ner": "token-classification",
    "sentiment-analysis": "text-classification",
    "summarization": "text2text-generation",
    "translation": "text2text-generation",
}

#: Tasks whose answers are generated texts.
GENERATING = frozenset(name for name, task in TASKS.items() if task.generates)


def parameter_schemas(task: str, do: str = "predict") -> dict[str, dict[str, Any]]:
    """JSON schema of each parameter of a task's operation; empty for an unknown one."""
    known = TASKS.get(ALIASES.get(task, task))
    parameters = known.parameters_of(do) if known else None
    return {name: parameter.schema() for name, parameter in (parameters or {}).items()}


def check_parameters(task: str, do: str, parameters: object) -> dict[str, Any]:
    """Check the given parameters, in the order of their names.

    Null is "not given", unless the table gives it a meaning.

    Raises:
        InvalidInput: a parameter is unknown, has the wrong type or is out of range.
    """
    table = TASKS[task].parameters_of(do) or {}
    if not isinstance(parameters, Mapping):
        raise InvalidInput(f"parameters: must be an object; not {quote(parameters)}")
    checked: dict[str, Any] = {}
    for name in sorted(parameters, key=str):
        if name not in table:
            raise InvalidInput(f"parameters.{_shown(name)}: unknown parameter; {_known(table)}")
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
    return f"known are {', '.join(sorted(table))}" if table else "this operation takes none"


def _check_labels(parameters: dict[str, Any]) -> None:
    """Check the labels and the template of a zero-shot task."""
    stripped = (label.strip() for label in parameters.get("candidate_labels", ()))
    labels = tuple(filter(None, stripped))
    if not labels:
        raise InvalidInput(
            "parameters.candidate_labels: name the labels to choose from, such as "
            '["sports", "politics"]'
        )
    parameters["candidate_labels"] = labels
    template = parameters.get("hypothesis_template", "{}")
    # str.format fills it. Anything but one plain {} would give clients the format language, in
    # which "{:>9999999999}" takes ten gigabytes.
    if template.count("{}") != 1 or re.search(r"[{}]", template.replace("{}", "")):
        raise InvalidInput(
            "parameters.hypothesis_template: must have {} once, in place of the label, and no "
            f"other braces; not {quote(template)}"
        )
    check_unicode("parameters.hypothesis_template", template)


def parse_item(item: object) -> tuple[str, Any, Any]:
    """Operation, inputs and parameters of an item. Anything but a request is an input."""
    if isinstance(item, dict) and item.keys() - {"arrays"} == {"do", "inputs", "parameters"}:
        do, parameters = item["do"], item["parameters"]
        return str(do), item["inputs"], {} if parameters is None else parameters
    return "predict", item, {}


def _shown(name: object) -> str:
    text = str(name).encode("ascii", "backslashreplace").decode()
    return text if len(text) <= 60 else text[:57] + "..."


# -- which options suit which task
#
# The command refuses with these words what a worker would refuse after it has imported torch.


def known_task(task: str) -> str:
    """The task by our name of it.

    Raises:
        ValueError: the task is unknown.
    """
    task = ALIASES.get(task, task)
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}; must be one of {', '.join(sorted(TASKS))}")
    return task


def check_suits(
    task: str, options: Mapping[str, Any], name: Callable[[str], str] = lambda option: option
) -> None:
    """Refuse an option that was given and does not suit the task.

    Args:
        task: one of ``TASKS``.
        options: values by the names of options; others than those of pipelines are left alone.
        name: what the user calls an option.

    Raises:
        ValueError: an option does not suit the task; the text says what to do.
    """
    takes = TASKS[task].takes
    if options.get("max_batch_tokens") is not None and (takes != "text" or task in GENERATING):
        raise ValueError(
            f"{name('max_batch_tokens')} has no effect on {task}: it is for tasks on texts "
            f"other than generation; leave it out, or set {name('max_batch_cost')}"
        )
    if options.get("max_batch_seconds") is not None and takes != "audio":
        option = name("max_batch_seconds")
        raise ValueError(f"{option} has no effect on {task}: it is for sounds; leave it out")
    if options.get("compile") and not TASKS[task].compiles:
        raise ValueError(f"models of {task} cannot be compiled here; leave {name('compile')} out")
    if options.get("preprocess_workers") and task == "image-to-text":
        option = name("preprocess_workers")
        raise ValueError(f"{task} runs by steps, and has no preprocess; leave {option} out")
    if options.get("preprocess_workers") and takes == "text":
        option = name("preprocess_workers")
        raise ValueError(
            f"{option} is for images and sounds: the texts of {task} are tokenized by compiled "
            f"code; leave {option} out"
        )
