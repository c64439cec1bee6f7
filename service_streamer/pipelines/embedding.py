""" "predict", "embed_all" and "embed" of feature extraction."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any, NamedTuple

from ..errors import InvalidInput
from .requests import Request, quote
from .tensors import TensorHandler, Text


class FeatureExtractor(TensorHandler):
    """The last hidden state of each token of a text."""

    takes_tokens = True

    def plan(self, requests: list[Request]) -> tuple[int, Any]:
        """The number of texts, and where their tokens are among all rows' tokens."""
        import torch

        longest = self.padded_length(requests)
        places: list[int] = []
        for row, request in enumerate(requests):
            start = row * longest + (longest - request.tokens if self.pads_left else 0)
            places += range(start, start + request.tokens)
        return len(requests), torch.tensor(places)

    def compute(self, inputs: Mapping[str, Any], plan: tuple[int, Any]) -> Any:
        count, places = plan
        states = self.pipeline.model(**inputs)[0]
        if states.shape[1] != inputs["input_ids"].shape[1]:  # it has a state for several tokens
            return states[:count]
        return states.flatten(0, 1).index_select(0, places)  # without those of padding

    def results(self, requests: list[Request], outputs: Any) -> list[Any]:
        states = outputs.float().numpy()  # numpy has no bfloat16, and is twice as fast
        if outputs.ndim > 2:
            rows = [states[at][: each.tokens] for at, each in enumerate(requests)]
        else:
            ends = accumulate(request.tokens for request in requests)
            pairs = zip(requests, ends, strict=True)
            rows = [states[end - each.tokens : end] for each, end in pairs]
        return [
            [row if each.wants_arrays else row.tolist()]
            for each, row in zip(requests, rows, strict=True)
        ]


class TokenEmbedder(FeatureExtractor):
    """ "embed_all": the same, as an operation of its own."""

    warms_up = False  # "predict" has run the model


class SentenceEmbedder(TensorHandler):
    """ "embed": one vector of length 1 per text, as sentence-transformers makes it.

    Args:
        pipeline: a pipeline of transformers.
        settings: what the model's files ask for, without an obstacle.

    Attributes:
        limit: maximum number of tokens of a text.
    """

    inputs = ("input_ids", "attention_mask")
    side = "right"  # poolings look for the first and the last token
    takes_tokens = may_be_blank = True

    def __init__(self, pipeline: Any, settings: SentenceSettings) -> None:
        super().__init__(pipeline)
        self.can_batch = True  # with a mask, any token will do as padding
        self.settings = settings
        self.limit = min((each for each in (self.limit, settings.limit) if each), default=None)
        excluded = {} if settings.pools_prompt else settings.prompts
        #: Tokens of the prompts that are not pooled.
        self._excluded = {name: self._tokens_of(text) for name, text in excluded.items() if text}

    def fit(self, text: str, request: Request, field: str = "inputs") -> str:
        name, prompts = self._prompt_of(request), self.settings.prompts
        if name is not None and name not in prompts:
            raise InvalidInput(
                f"parameters.prompt_name: {quote(name)} is none of the model's prompts, "
                f"{', '.join(map(quote, prompts))}; leave it out, and write the prompt before the "
                "text"
            )
        return super().fit(text if name is None else prompts[name] + text, request, field)

    def _take_tokens(self, request: Request) -> None:
        if "prompt_name" in request.parameters:
            raise InvalidInput(
                "parameters.prompt_name: no prompt comes before a list of tokens; send a text"
            )
        super()._take_tokens(request)

    def text_of(self, request: Request) -> Text:
        text: str = request.inputs
        return text.lower() if self.settings.lowers else text

    def _prompt_of(self, request: Request) -> str | None:
        name: str | None = request.parameters.get("prompt_name", self.settings.default)
        return name

    def _tokens_of(self, prompt: str) -> int:
        """Their number, with those that come before any text, and without those behind it."""
        ids = self.tokenizer(prompt.lower() if self.settings.lowers else prompt)["input_ids"]
        return len(ids) - (ids[-1] in self.tokenizer.all_special_ids)

    def plan(self, requests: list[Request]) -> tuple[int, Any, Any]:
        """The number of texts, which vectors keep their length, and how many tokens of each text
        are not pooled; None in place of what is so of no text.
        """
        import torch

        kept = [each.parameters.get("normalize") is False for each in requests]
        names = [isinstance(each.inputs, str) and self._prompt_of(each) for each in requests]
        excluded = [self._excluded.get(name or "", 0) for name in names]
        return (
            len(requests),
            torch.tensor(kept)[:, None] if any(kept) else None,
            torch.tensor(excluded)[:, None] if any(excluded) else None,
        )

    def compute(self, inputs: Mapping[str, Any], plan: tuple[int, Any, Any]) -> Any:
        import torch

        count, kept, excluded = plan
        mask = inputs["attention_mask"][:count]
        states = self.pipeline.model(**inputs)[0][:count]
        if excluded is not None:
            rest = mask * (torch.arange(mask.shape[1], device=mask.device) >= excluded)
            mask = torch.where(rest.any(dim=1, keepdim=True), rest, mask)  # it may be cut off
        pooled = _pool(states.float(), mask, self.settings.pooling)
        vectors = torch.nn.functional.normalize(pooled, dim=-1)
        return vectors if kept is None else torch.where(kept, pooled, vectors)

    def results(self, requests: list[Request], outputs: Any) -> list[Any]:
        return [
            {"embedding": vector, "tokens": request.tokens}
            for vector, request in zip(outputs.numpy().tolist(), requests, strict=True)
        ]


def _pool(states: Any, mask: Any, pooling: str) -> Any:
    import torch

    if pooling in ("cls", "lasttoken"):
        rows = torch.arange(len(states), device=states.device)  # numbers of the host's would wait
        first = mask.argmax(dim=1)  # padding is behind the text, and what is not pooled before it
        return states[rows, first if pooling == "cls" else first + mask.sum(dim=1) - 1]
    weights = mask.unsqueeze(-1).to(states.dtype)
    if pooling == "max":
        return states.masked_fill(weights == 0, float("-inf")).amax(dim=1)
    return (states * weights).sum(dim=1) / weights.sum(dim=1)


# -- what the files of a sentence-transformers folder ask for
#
# ``modules.json`` names the modules, each with a folder for its ``config.json``;
# ``config_sentence_transformers.json`` has prompts; ``sentence_bert_config.json`` says how texts
# are tokenized.


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
