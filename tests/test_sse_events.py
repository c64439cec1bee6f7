"""The events of answers that come in parts, form by form: outputs of a model in, bytes out.

And errors of generated text, before the first token and behind it.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from http_in_process import await_that
from models import NothingToLoad
from service_streamer import InvalidInput, ThreadedStreamer
from service_streamer.testing import Gate
from web_application import WebApplication

pytestmark = pytest.mark.no_gevent

#: A text with characters at which clients in Python split lines.
LINES = "a\n\x0b\x1e\x85\u2028\u2029b"


class Scripted(NothingToLoad):
    """A model of texts whose outputs are written down: by the prompt.

    Attributes:
        outputs: one for each step, or an error.
        scores: the prompt's tokens with their log probabilities.
        gate: where each step waits, if it is there.
    """

    outputs: dict[str, list[Any]]
    scores: dict[str, list[Any]]
    gate: Gate | None

    def describe(self) -> dict[str, Any]:
        return {
            "task": "text-generation", "operations": ["predict", "generate", "chat", "score"],
            "model": "m", "takes_parameters": True,
        }  # fmt: skip

    def start(self, items: list[dict[str, Any]]) -> list[list[Any]]:
        return [
            [self.scores[item["inputs"]]] if item["do"] == "score"
            else [*self.outputs[self._prompt(item["inputs"])]]
            for item in items
        ]  # fmt: skip

    def _prompt(self, inputs: Any) -> str:
        return inputs if isinstance(inputs, str) else inputs[-1]["content"]

    def step(self, states: list[list[Any]]) -> list[Any]:
        if self.gate is not None:
            self.gate.go_through()
        outputs = [(state.pop(0), not state) for state in states]
        return [each[0] if isinstance(each[0], Exception) else each for each in outputs]

    def join_outputs(self, outputs: list[Any]) -> Any:
        return outputs[-1]


def scripted(
    outputs: dict[str, list[Any]], scores: Any = None, gate: Gate | None = None, **options: Any
) -> WebApplication:
    """A service of such a model; the options are those of its streamer."""
    script = {"outputs": outputs, "scores": dict.fromkeys(outputs, scores), "gate": gate}
    model = type("Script", (Scripted,), script)
    return WebApplication(kind=lambda _: ThreadedStreamer(model, **options))


def events_of(
    path: str,
    request: dict[str, Any],
    outputs: list[Any] | dict[str, list[Any]],
    scores: list[Any] | None = None,
) -> list[Any]:
    """The data of all events of a stream, the last of which must be the end.

    Args:
        outputs: of the prompt "> ", or by prompt.
        scores: of that prompt's tokens.
    """
    with scripted(outputs if isinstance(outputs, dict) else {"> ": outputs}, scores) as application:
        response = application.post(path, {**request, "stream": True})
    assert response.status_code == 200, response.text
    assert len(response.text.splitlines()) == response.text.count("\n")
    *events, done, end = response.content.split(b"\n\n")
    assert (done, end) == (b"data: [DONE]", b"")
    assert all(each.startswith(b"data: ") and b"\n" not in each for each in events)
    return [json.loads(each.removeprefix(b"data: ")) for each in events]


def completions(outputs: Any, scores: Any = None, **request: Any) -> list[Any]:
    """The chunks of OpenAI's completions, without what all of them have."""
    prompts = [*outputs] if isinstance(outputs, dict) else "> "
    return chunks_of("/v1/completions", {"prompt": prompts, **request}, outputs, scores)


def chats(outputs: list[Any], **request: Any) -> list[Any]:
    said = [{"role": "user", "content": "> "}]
    return chunks_of("/v1/chat/completions", {"messages": said, **request}, outputs)


def chunks_of(path: str, request: dict[str, Any], outputs: Any, scores: Any = None) -> list[Any]:
    chunks = events_of(path, request, outputs, scores)
    kind = "chat.completion.chunk" if "chat" in path else "text_completion"
    heads = [[each.pop(name) for name in ("id", "created", "model", "object")] for each in chunks]
    assert all(head == heads[0] for head in heads)
    assert heads[0][2:] == ["m", kind]
    return chunks


def tokens(outputs: list[Any], **parameters: Any) -> list[Any]:
    """The events of text-generation-inference, as Hugging Face's client reads them."""
    from huggingface_hub import TextGenerationStreamOutput  # takes a second

    request = {"inputs": "> ", "parameters": parameters}
    events = events_of("/generate", request, outputs)
    return [TextGenerationStreamOutput.parse_obj_as_instance(each) for each in events]


def piece(text: str, made: int = 0, reason: str | None = None, index: int = 0) -> dict[str, Any]:
    end = {"finish_reason": reason, "prompt_tokens": 3, "completion_tokens": made}
    return {"index": index, "text": text, "tokens": 1, "ids": [7], **(end if reason else {})}


TWO = [
    {"choices": [piece(LINES), piece("", index=1)]},
    {"choices": [piece("c", 2, "length")]},
    {"choices": [piece("d", 2, "stop", 1)]},
]
USAGE = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
EACH = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


def with_usage(wanted: bool) -> dict[str, Any]:
    return {"stream_options": {"include_usage": True}} if wanted else {}


@pytest.mark.parametrize("include_usage", [False, True])
def test_completions_have_a_chunk_for_each_piece(include_usage: bool) -> None:
    chunks = completions(TWO, n=2, **with_usage(include_usage))
    if include_usage:
        assert chunks.pop() == {"choices": [], "usage": USAGE}
    assert [chunk.pop("choices") for chunk in chunks] == [
        [{"text": text, "index": index, "logprobs": None, "finish_reason": reason}]
        for text, index, reason in [
            (LINES, 0, None), ("", 1, None), ("c", 0, "length"), ("d", 1, "stop"),
        ]
    ]  # fmt: skip
    assert chunks == [{"usage": None} if include_usage else {}] * 4


@pytest.mark.parametrize(
    ("ask", "numbers"), [(completions, [1, 1, 2, 2]), (chats, [1, 1, 1, 2, 2, 2, 2])]
)
def test_each_chunk_counts_the_tokens_of_its_text_if_wanted(ask: Any, numbers: list[int]) -> None:
    begun = [{"choices": [{**each, "prompt_tokens": 3} for each in TWO[0]["choices"]]}, *TWO[1:]]
    *chunks, last = ask(begun, n=2, **EACH)
    assert [chunk["usage"] for chunk in chunks] == [
        {"prompt_tokens": 3, "completion_tokens": each, "total_tokens": 3 + each}
        for each in numbers
    ]
    assert last == {"choices": [], "usage": USAGE}


def test_prompt_begins_each_sequence_with_echo() -> None:
    chunks = completions(TWO, n=2, echo=True)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["> " + LINES, "> ", "c", "d"]


def token(text: str, logprob: float | None = -1.0, **more: Any) -> dict[str, Any]:
    return {"token": text, "id": 5, "logprob": logprob, "top": [], **more}


def ended_by(*tokens: dict[str, Any]) -> list[Any]:
    return [{**piece("", 1, "stop"), "logprobs": [*tokens]}]


@pytest.mark.parametrize(
    ("text", "tokens", "offsets"),
    [
        ("ab", [token("a"), token("b")], [0, 1]),
        ("the sun", [token(" the"), token(" sun")], [0, 3]),  # the text has no first blank
        (" the", [token(" the")], [0]),
        ("a", [token("<s>", special=True), token("a")], [0, 0]),  # the model adds it
        ("<s>a", [token("<s>", special=True), token("a")], [0, 3]),  # the text has it
        ("\u00e9a", [token("?", bytes=[0xC3]), token("?", bytes=[0xA9]), token("a")], [0, 0, 1]),
        ("", [], []),
    ],
)
def test_echoed_tokens_have_their_places_in_the_prompt(
    text: str, tokens: list[dict[str, Any]], offsets: list[int]
) -> None:
    [chunk] = completions({text: ended_by(token("!"))}, tokens, echo=True, logprobs=0)
    part = chunk["choices"][0]["logprobs"]
    assert part["text_offset"] == [*offsets, len(text)]
    assert len(part["tokens"]) == len(tokens) + 1


@pytest.mark.parametrize("include_usage", [False, True])
def test_chat_says_the_role_first(include_usage: bool) -> None:
    chunks = chats(TWO, n=2, **with_usage(include_usage))
    if include_usage:
        assert chunks.pop() == {"choices": [], "usage": USAGE}
    role = {"role": "assistant", "content": ""}
    assert [
        (choice["index"], choice["delta"], choice["finish_reason"])
        for chunk in chunks
        for choice in chunk["choices"]
    ] == [
        (0, role, None), (0, {"content": LINES}, None), (1, role, None),
        (0, {"content": "c"}, None), (0, {}, "length"),
        (1, {"content": "d"}, None), (1, {}, "stop"),
    ]  # fmt: skip
    assert all(("usage" in chunk) == include_usage for chunk in chunks)


@pytest.mark.parametrize(("reason", "tgis"), [("stop", "eos_token"), ("length", "length")])
def test_hugging_faces_client_reads_tokens(reason: str, tgis: str) -> None:
    first, last = tokens([piece("a "), piece("b", 2, reason)], seed=4)
    assert (first.index, first.token.text, first.generated_text) == (1, "a ", None)
    assert first.details is None
    assert (last.index, last.token.text, last.generated_text) == (2, "b", "a b")
    assert last.details.finish_reason == tgis
    assert (last.details.generated_tokens, last.details.input_length) == (2, 3)
    assert (last.details.seed, last.token.id) == (4, 7)


#: Of "a", of an e with an accent in two tokens, and of the end.
WITH_LOGPROBS = [
    {**piece("a"), "logprobs": [{**token("a", -1.0), "top": [token("b", -0.5)]}]},
    {**piece(""), "logprobs": [{**token("\ufffd", -2.0, bytes=[195]), "top": []}]},
    {**piece("\xe9"), "logprobs": [{**token("\ufffd", -float("inf"), bytes=[169]), "top": []}]},
    {**piece("", 4, "stop"), "logprobs": [{**token("</s>", -3.0, special=True), "top": []}]},
]


def test_completions_have_log_probabilities() -> None:
    chunks = completions(WITH_LOGPROBS, logprobs=1)
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert parts[0] == {
        "tokens": ["a"], "token_logprobs": [-1], "top_logprobs": [{"b": -0.5, "a": -1}],
        "text_offset": [0],
    }  # fmt: skip
    assert [part["tokens"] for part in parts[1:]] == [["bytes:\\xc3"], ["bytes:\\xa9"], []]
    assert [part["text_offset"] for part in parts[1:]] == [[1], [1], []]
    assert parts[2]["token_logprobs"] == [-9999]


def test_places_of_tokens_do_not_count_a_blank_that_the_text_lacks() -> None:
    """As behind a prompt of special tokens."""
    pieces = [{**piece("the"), "logprobs": [token(" the")]}, *ended_by(token("!"))]
    parts = [chunk["choices"][0]["logprobs"] for chunk in completions(pieces, logprobs=0)]
    assert [part["text_offset"] for part in parts] == [[0], [3]]


def test_hugging_faces_tokens_have_details() -> None:
    told = tokens(WITH_LOGPROBS, return_full_text=True, details=True, logprobs=1)
    assert [each.token.text for each in told] == ["a", "", "\xe9", ""]
    assert [each.token.logprob for each in told] == [-1, -2, -9999, -3]
    assert told[0].top_tokens[0].text == "b"
    assert told[-1].token.special
    assert told[-1].generated_text == "> a\xe9"


def test_text_that_comes_with_the_end_token_is_not_special() -> None:
    """Clients that skip special tokens get it, too."""
    end = token("</s>", -3.0, special=True)
    [sent] = tokens([{**piece("held back", 1, "stop"), "logprobs": [end]}])
    assert (sent.token.text, sent.token.special) == ("held back", False)


def test_text_that_was_computed_as_a_whole_is_one_event() -> None:
    [only] = tokens([{"result": [{"generated_text": "a b"}]}])
    assert (only.index, only.token.text, only.generated_text) == (1, "a b", "a b")


def test_any_output_is_an_event() -> None:
    numpy = pytest.importorskip("numpy")
    outputs = [1, LINES, {"a": numpy.arange(2)}]
    assert events_of("/predict", {"inputs": "> ", "parameters": {"top_k": 1}}, outputs) == [
        {"output": 1}, {"output": LINES}, {"output": {"a": [0, 1]}},
    ]  # fmt: skip


# -- errors

SECRET = ValueError("a secret")
REFUSED = InvalidInput("parameters.regex: cannot go on\u2028")

errors = pytest.mark.parametrize(
    ("failure", "status", "code", "kind"),
    [
        (SECRET, 500, "model_failed", "server_error"),
        (REFUSED, 400, "invalid_value", "invalid_request_error"),
    ],
    ids=["of the model", "of the input"],
)


@errors
@pytest.mark.parametrize("prompts", ["> ", ["> ", "long"]])
def test_error_in_mid_stream_is_the_last_event(
    prompts: Any, failure: Exception, status: int, code: str, kind: str
) -> None:
    """Of several prompts one fails, and then the others are not computed any more."""
    with scripted({"> ": [piece("a "), failure], "long": [piece("x")] * 10_000}) as application:
        body = {"prompt": prompts, "stream": True}
        response = application.post("/v1/completions", body)
        assert not application.service.streams
        assert application.get("/stats").json()["streams"]["open"] == 0
    assert response.status_code == 200
    *events, last, end = response.text.split("\n\n")
    assert [each.startswith('data: {"id"') for each in events] == [True] * len(events) != []
    told = json.loads(last.removeprefix("data: "))["error"]
    assert (told["code"], told["type"], end) == (code, kind, ""), "and no [DONE]"
    assert "secret" not in last
    assert "\u2028" not in last


@errors
@pytest.mark.parametrize("stream", [False, True])
def test_error_before_the_first_token_has_its_status(
    stream: bool, failure: Exception, status: int, code: str, kind: str
) -> None:
    with scripted({"> ": [failure]}) as application:
        response = application.post("/v1/completions", {"prompt": "> ", "stream": stream})
    told = response.json()["error"]
    assert (response.status_code, told["code"], told["type"]) == (status, code, kind)
    assert told["param"] == ("response_format" if failure is REFUSED else None)
    assert "secret" not in response.text


@pytest.mark.parametrize(("name", "value"), [("best_of", 2), ("logprobs", 0)])
def test_error_names_the_field_that_was_sent(name: str, value: int) -> None:
    whole = InvalidInput("parameters.logprobs: this worker generates whole texts")
    with scripted({"> ": [whole]}) as application:
        error = application.post("/v1/completions", {"prompt": "> ", name: value}).json()["error"]
    assert error["param"] == name
    assert error["message"].startswith(f"{name}: this worker")


def test_streams_of_several_prompts_are_closed_when_one_cannot_be_opened(gate: Gate) -> None:
    async def main() -> None:
        def pending() -> int:
            return application.streamer.stats().pending

        def ask(prompts: list[str]) -> asyncio.Task[Any]:
            body = {"prompt": prompts, "stream": True}
            return asyncio.create_task(application.send("/v1/completions", body))

        waiting = [ask(["> "])]
        await asyncio.to_thread(gate.await_arrival)
        while pending() < 2:  # the scheduler sends some ahead
            waiting.append(ask(["> "]))
            await asyncio.sleep(0)
        before = pending()
        refused = await ask(["> "] * 3)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        await await_that(lambda: pending() <= before)
        gate.let_through(100)
        assert {each.status_code for each in await asyncio.gather(*waiting)} == {200}

    output = [piece("a", 1, "stop")]
    with scripted({"> ": output}, gate=gate, batch_size=1, max_pending=3) as application:
        application.run(main())
