"""What the files of a sentence-transformers folder ask for, and what of it cannot be done. Pure.

``modules.json`` names the modules, each with a folder for its ``config.json``;
``config_sentence_transformers.json`` has prompts; ``sentence_bert_config.json`` says how texts are
tokenized.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

#: As sentence-transformers looks for it: its first versions wrote the model's kind into the name.
_TOKENIZING = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)

_MODULES = {"Transformer", "Pooling", "Normalize"}
_POOLINGS = {"cls", "lasttoken", "max", "mean"}

#: Arguments for transformers, by their names in old and new files, and another tokenizer.
_ARGUMENTS = (
    "model_args", "tokenizer_args", "config_args", "model_kwargs", "processor_kwargs",
    "config_kwargs", "processing_kwargs", "tokenizer_name_or_path",
)  # fmt: skip

#: Those that change no vector but for its precision.
_HARMLESS = {"add_pooling_layer", "attn_implementation", "dtype", "torch_dtype"}


class SentenceSettings(NamedTuple):
    """How a model makes one vector of a text.

    Attributes:
        obstacle: why its vectors would differ from sentence-transformers'; empty if they agree.
        pooling: of the tokens' vectors: "mean", "cls", "lasttoken" or "max".
        pools_prompt: whether the tokens of a prompt are pooled, too.
        prompts: texts that may come before the inputs, by name. Every model has two.
        default: name of the prompt of inputs that choose none; None for no prompt.
        limit: maximum number of tokens of a text; None if the files do not say.
        lowers: whether texts are written in lower case.
    """

    obstacle: str
    pooling: str
    pools_prompt: bool
    prompts: Mapping[str, str]
    default: str | None
    limit: int | None
    lowers: bool


def sentence_settings(read_json: Callable[[str], Any]) -> SentenceSettings:
    """Read the files. Without any, a vector is the mean of its tokens'.

    Args:
        read_json: reads a JSON file of the model; returns None if there is no such file.
    """
    paths = {_kind(each): each.get("path") for each in read_json("modules.json") or ()}
    pooling = (read_json(f"{paths['Pooling']}/config.json") or {}) if "Pooling" in paths else {}
    own: dict[str, Any] = read_json("config_sentence_transformers.json") or {}
    texts: Any = next((found for name in _TOKENIZING if (found := read_json(name))), {})
    prompts = own["prompts"] = {"query": "", "document": "", **(own.get("prompts") or {})}
    modes = _modes(pooling)
    return SentenceSettings(
        _obstacle(paths, modes, own) or _obstacle_of_texts(texts),
        pooling=modes[0],
        pools_prompt=pooling.get("include_prompt") is not False,
        prompts={name: text or "" for name, text in prompts.items()},
        default=own.get("default_prompt_name"),
        limit=texts.get("max_seq_length"),
        lowers=bool(texts.get("do_lower_case")),
    )


def _kind(module: Mapping[str, Any]) -> str:
    """The class of a module of sentence-transformers; of others with where it comes from."""
    kind = str(module.get("type"))
    return kind.rpartition(".")[2] if kind.startswith("sentence_transformers.") else kind


def _modes(pooling: Mapping[str, Any]) -> list[str]:
    """The poolings whose vectors are joined."""
    named = pooling.get("pooling_mode")  # of newer versions
    old = [name for name, on in pooling.items() if name.startswith("pooling_mode_") and on]
    names = old or ["mean"] if not named else [named] if isinstance(named, str) else named
    return [name.removeprefix("pooling_mode_").partition("_token")[0] for name in names]


def _obstacle(paths: Mapping[str, Any], modes: list[str], own: Mapping[str, Any]) -> str:
    unknown = sorted(paths.keys() - _MODULES)
    if unknown:
        return f"it has modules of sentence-transformers, such as {unknown[0]}"
    if own.get("model_type") not in (None, "SentenceTransformer"):
        return f"it is a {own['model_type']} of sentence-transformers"
    if paths.get("Transformer"):
        return f"its transformer is in a folder of its own, {paths['Transformer']}"
    if len(modes) > 1 or modes[0] not in _POOLINGS:
        return f"it pools by {' and '.join(modes)}"
    if own.get("truncate_dim"):
        return f"its vectors are cut to {own['truncate_dim']} numbers; ask for so many dimensions"
    if own.get("default_prompt_name", "query") not in (None, *own["prompts"]):
        return f"its default_prompt_name, {own['default_prompt_name']!r}, is none of its prompts"
    return ""


def _obstacle_of_texts(texts: Mapping[str, Any]) -> str:
    for name in _ARGUMENTS:
        if {*(texts.get(name) or ())} - _HARMLESS:
            return f"its texts are prepared with {name} of sentence-transformers"
    how = (texts.get("modality_config") or {"text": {}}).get("text", {"method": ""})
    if how.get("method", "forward") != "forward":
        return "it takes chats or other media, and no texts"
    output = how.get("method_output_name", "last_hidden_state")
    if output != "last_hidden_state":
        return f"its vectors are made of {output}"
    return ""
