"""Generated text in OpenAI's forms: /v1/completions and /v1/chat/completions."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from ...errors import InvalidInput
from .context import RequestContext
from .events import ChatEvents, CompletionEvents, UsageIn
from .generation_schemas import (
    NOT_OFFERED,
    ChatAnswer,
    ChatChoice,
    ChatRequest,
    ChatResponse,
    Completion,
    CompletionsRequest,
    CompletionsResponse,
    text_form,
)
from .json_bodies import JSONAnswer, read_json
from .logprobs import Echo, LegacyLogprobs, best_rows, chat_logprobs
from .refusals import invalid, renamed, unsupported
from .schemas import Usage, inputs_of, log_harmless
from .streaming import EventStream

#: Parameters that the model and the requests call the same, and that have no default.
_AS_THEY_ARE = (
    "frequency_penalty", "presence_penalty", "repetition_penalty", "top_k", "min_p", "logit_bias",
    "ignore_eos",
)  # fmt: skip

#: Names of the model's parameters in OpenAI's requests.
_OPENAIS_NAMES = {
    "parameters.max_new_tokens": "max_tokens",
    "parameters.min_new_tokens": "min_tokens",
    "parameters.num_return_sequences": "n",
    "parameters.json_schema": "response_format",
    "parameters.regex": "response_format",
    **{
        f"parameters.{name}": name
        for name in ("temperature", "top_p", "stop", "seed", "logprobs", *_AS_THEY_ARE)
    },
}
_COMPLETIONS_NAMES = {"inputs": "prompt", **_OPENAIS_NAMES}
_CHAT_NAMES = {"inputs": "messages", **_OPENAIS_NAMES}

_TOOLS = ("tools", "tool_choice", "functions", "function_call")

_read_completions = msgspec.json.Decoder(CompletionsRequest)
_read_chat = msgspec.json.Decoder(ChatRequest)


async def completions(body: bytes, context: RequestContext) -> JSONAnswer | EventStream:
    request: CompletionsRequest = await read_json(_read_completions, body)
    parameters = _openais_parameters(request, context)
    count = request.n or 1
    candidates = request.best_of or count
    _check_completions(request, count, candidates)
    if candidates > count:
        parameters["num_return_sequences"] = candidates
        parameters.setdefault("logprobs", 0)  # by which the best are found
    prompts, _ = inputs_of(request.prompt, "prompt")
    context.check_count(len(prompts))
    items = [{"do": "generate", "inputs": each, "parameters": parameters} for each in prompts]
    head = _head("cmpl", context)
    outputs: list[Any] = []
    echoes: list[Echo] = []
    try:
        if request.echo:
            echoes = await echoes_of(
                prompts, request.logprobs, context, counts=request.most_tokens == 0
            )
        if request.stream:
            chunks = CompletionEvents(
                {**head, "object": "text_completion"},
                usage=_wanted_usage(request),
                texts=count,
                echoes=echoes,
            )
            return await context.stream(items[0], chunks, *items[1:])
        if request.most_tokens != 0:
            outputs = await context.compute(items)
    except InvalidInput as error:
        names = _COMPLETIONS_NAMES
        if candidates > count:
            names = {**names, "parameters.num_return_sequences": "best_of"}
            if request.logprobs is None:
                names["parameters.logprobs"] = "best_of"
        raise renamed(error, names) from None
    if request.most_tokens == 0:
        outputs = [_nothing_after(echo, count) for echo in echoes]
    choices: list[Completion] = []
    for number, sequences in enumerate(outputs):
        echo = echoes[number] if echoes else None
        best = best_rows(sequences, count) if candidates > count else sequences
        for sequence in best:
            text = sequence["text"] if echo is None else echo.text + sequence["text"]
            wanted = None
            if request.logprobs is not None:
                found = LegacyLogprobs(with_special=echo is not None)
                wanted = found.of(sequence["logprobs"], text, echo)
            choices.append(Completion(text, len(choices), sequence["finish_reason"], wanted))
    answer = CompletionsResponse(**head, choices=choices, usage=_usage(outputs))
    return await context.answer(lambda: answer)


def _check_completions(request: CompletionsRequest, count: int, candidates: int) -> None:
    """Raises Refusal: fields do not go together."""
    if candidates < count:
        raise invalid("best_of", f"must be at least n, which is {count}")
    if candidates > count and request.stream:
        raise invalid("best_of", "cannot be streamed beyond n; leave stream or best_of out")
    if request.most_tokens == 0:
        if not request.echo:
            raise invalid("max_tokens", "must be at least 1 without echo")
        if request.stream:
            raise invalid("max_tokens", "must be at least 1 for a stream")
        if candidates > count:
            raise invalid("best_of", "must be n if max_tokens is 0")


def _nothing_after(echo: Echo, count: int) -> list[dict[str, Any]]:
    """The texts of a prompt that gets no new tokens."""
    text = {
        "text": "", "finish_reason": "length", "logprobs": [],
        "prompt_tokens": echo.size, "completion_tokens": 0,
    }  # fmt: skip
    return [text] * count


async def chat(body: bytes, context: RequestContext) -> JSONAnswer | EventStream:
    request: ChatRequest = await read_json(_read_chat, body)
    parameters = _openais_parameters(request, context)
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid("top_logprobs", "is only for answers with logprobs; set logprobs to true")
    messages = [message.plain() for message in request.messages]
    item = {"do": "generate", "inputs": messages, "parameters": parameters}
    head = _head("chatcmpl", context)
    try:
        if request.stream:
            chunks = ChatEvents(
                {**head, "object": "chat.completion.chunk"}, usage=_wanted_usage(request)
            )
            return await context.stream(item, chunks)
        [sequences] = await context.compute([item])
    except InvalidInput as error:
        raise renamed(error, _CHAT_NAMES) from None
    choices = [
        ChatChoice(
            index,
            ChatAnswer(each["text"]),
            each["finish_reason"],
            chat_logprobs(each["logprobs"]) if request.logprobs else None,
        )
        for index, each in enumerate(sequences)
    ]
    answer = ChatResponse(**head, choices=choices, usage=_usage([sequences]))
    return await context.answer(lambda: answer)


def _openais_parameters(
    request: CompletionsRequest | ChatRequest, context: RequestContext
) -> dict[str, Any]:
    """The model's parameters. Raises Refusal: a field has an effect that is not supported."""
    log_harmless(request)
    for name, harmless in NOT_OFFERED.items():
        value = getattr(request, name, None)
        if not any(type(value) is type(each) and value == each for each in harmless):
            if name in _TOOLS:
                raise unsupported(name, "is not supported: models have no tools; leave it out")
            raise unsupported(name)
    if request.stream:
        context.check_streams()
    elif request.stream_options is not None:
        raise unsupported("stream_options", "is not supported without stream; leave it out")
    parameters: dict[str, Any] = {
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "num_return_sequences": request.n or 1,
    }
    if request.most_tokens is not None:
        parameters["max_new_tokens"] = request.most_tokens
    if request.min_tokens is not None:
        parameters["min_new_tokens"] = request.min_tokens
    parameters["do_sample"] = parameters["temperature"] > 0
    if request.top_p is not None and request.top_p < 1:
        parameters["top_p"] = request.top_p
    if request.stop:
        parameters["stop"] = [request.stop] if isinstance(request.stop, str) else request.stop
    if request.seed is not None:
        parameters["seed"] = request.seed
    if request.alternatives is not None:
        parameters["logprobs"] = request.alternatives
    for name in _AS_THEY_ARE:
        if getattr(request, name) is not None:
            parameters[name] = getattr(request, name)
    return parameters | text_form(request.response_format, "response_format")


def _head(kind: str, context: RequestContext) -> dict[str, Any]:
    return {
        "id": f"{kind}-{secrets.token_hex(12)}",
        "created": int(time.time()),
        "model": context.model,
    }


def _wanted_usage(request: CompletionsRequest | ChatRequest) -> UsageIn:
    options = request.stream_options
    if options is None or not options.include_usage:
        return "none"
    return "each" if options.continuous_usage_stats else "last"


def _usage(outputs: list[Any]) -> Usage:
    taken = sum(sequences[0]["prompt_tokens"] for sequences in outputs)
    made = sum(each["completion_tokens"] for sequences in outputs for each in sequences)
    return Usage(taken, taken + made, made)


async def echoes_of(
    prompts: Sequence[Any], logprobs: int | None, context: RequestContext, *, counts: bool
) -> list[Echo]:
    """The echo of each prompt. What only the model knows is asked for in one call.

    Args:
        prompts: texts, and lists of tokens.
        logprobs: how many of the likeliest tokens are told in place of each; None for no log
            probabilities.
        counts: whether the numbers of tokens are needed.

    Raises:
        Refusal: the model does not compute log probabilities of prompts.
        InvalidInput: a prompt is wrong.
    """
    if logprobs is not None and "score" not in context.description.get("operations", ()):
        raise unsupported(
            "logprobs",
            "is not supported with echo: this model computes none of a prompt; leave one of them "
            "out",
        )
    items: list[Any] = []
    for prompt in prompts:
        is_text = isinstance(prompt, str)
        if not is_text:
            items.append(_item("decode", prompt, skip_special_tokens=False))
        if logprobs is not None:
            items.append(_item("score", prompt, logprobs=logprobs))
        elif counts and is_text:
            items.append(_item("tokenize", prompt))
    results = iter(await context.compute(items) if items else ())
    echoes = []
    for prompt in prompts:
        text = prompt if isinstance(prompt, str) else next(results)
        if logprobs is not None:
            tokens = next(results)
            echoes.append(Echo(text, tokens, len(tokens)))
        elif isinstance(prompt, str):
            echoes.append(Echo(text, None, len(next(results)) if counts else 0))
        else:
            echoes.append(Echo(text, None, len(prompt)))
    return echoes


def _item(do: str, prompt: Any, **parameters: Any) -> dict[str, Any]:
    return {"do": do, "inputs": prompt, "parameters": parameters}
