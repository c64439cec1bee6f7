"""Errors of generated text, as clients are told of them: before the first token and behind it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest

from http_in_process import in_event_loop, serving
from service_streamer import InvalidInput, InvalidItems, ManagedModel, ThreadedStreamer
from service_streamer.testing import Gate

pytestmark = pytest.mark.no_gevent  # an event loop of its own


class Parrot(ManagedModel):
    """A stand-in for a model that generates: says the words of its prompt, one at each step.

    It stops where a word is "FAIL" or "REFUSE", and waits for the gate where it is "WAIT".
    """

    gate: Gate | None = None

    def init_model(self) -> None:
        """Nothing to load."""

    def describe(self) -> dict[str, Any]:
        return {
            "task": "text-generation", "operations": ["predict", "generate"], "model": "parrot",
            "takes_parameters": True,
        }  # fmt: skip

    def start(self, items: list[Any]) -> list[list[str]]:
        for item in items:
            if "logprobs" in item["parameters"]:
                raise InvalidInput("parameters.logprobs: this worker generates whole texts")
        return [[*reversed(item["inputs"].split())] for item in items]

    def step(self, states: list[list[str]]) -> list[tuple[Any, bool]]:
        refused = [at for at, words in enumerate(states) if words[-1] == "REFUSE"]
        if refused:
            raise InvalidItems(
                {at: InvalidInput("parameters.regex: cannot go on") for at in refused}
            )
        for words in states:
            if words[-1] == "FAIL":
                raise ValueError("a secret")
            if words[-1] == "WAIT":
                assert self.gate is not None
                self.gate.go_through()
        return [self._said(words) for words in states]

    def _said(self, words: list[str]) -> tuple[Any, bool]:
        output: dict[str, Any] = {"text": words.pop() + " ", "tokens": 1, "ids": [1]}
        if not words:
            output |= {"finish_reason": "stop", "prompt_tokens": 1, "completion_tokens": 1}
        return output, not words

    def join_outputs(self, outputs: list[Any]) -> Any:
        text = "".join(each["text"] for each in outputs)
        return [{**outputs[-1], "text": text}]


@asynccontextmanager
async def parrot(gate: Gate | None = None, **options: Any) -> AsyncIterator[Any]:
    """A service in this process, its client, and OpenAI's."""
    model = type("Parrot", (Parrot,), {"gate": gate})
    most = options.get("max_pending")
    with ThreadedStreamer(model, batch_size=1, max_pending=most) as streamer:
        async with serving(streamer, "parrot", **options) as application:
            transport = httpx.ASGITransport(application.app)
            async with (
                httpx.AsyncClient(transport=transport, base_url="http://parrot") as client,
                openai.AsyncOpenAI(
                    base_url="http://parrot/v1", api_key="any", max_retries=0, http_client=client
                ) as other,
            ):
                yield application.service, client, other.completions
        if gate is not None:
            gate.let_through(100)


async def read(completions: Any, prompt: str | list[str], texts: list[str], **more: Any) -> None:
    """Stream, and put down what comes."""
    chunks = await completions.create(model="any", prompt=prompt, stream=True, **more)
    async for chunk in chunks:
        texts.append(chunk.choices[0].text)


@in_event_loop
async def test_error_in_mid_stream_is_raised_by_openais_client() -> None:
    async with parrot() as (service, _, completions):
        texts: list[str] = []
        with pytest.raises(openai.APIError, match="the model failed on this request") as caught:
            await read(completions, "a b FAIL", texts)
        assert texts == ["a ", "b "]
        assert caught.value.code == "model_failed"
        assert "secret" not in str(caught.value)
        assert service.requests.answers["/v1/completions", 500] == 1
        with pytest.raises(openai.APIError, match="cannot go on") as caught:
            await read(completions, "a REFUSE", texts)
        assert (caught.value.code, caught.value.type) == (
            "invalid_value", "invalid_request_error",
        )  # fmt: skip


@in_event_loop
async def test_error_before_the_first_token_has_its_status() -> None:
    async with parrot() as (_, client, completions):
        with pytest.raises(openai.InternalServerError) as caught:
            await completions.create(model="any", prompt="FAIL", stream=True)
        assert caught.value.code == "model_failed"
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match="response_format: cannot") as told:
                await completions.create(model="any", prompt="REFUSE", stream=stream)
            assert told.value.param == "response_format"
        answer = await client.post("/generate", json={"text": "a FAIL", "stream": True})
        last = answer.text.split("\n\n")[-2]
        assert "error" in json.loads(last.removeprefix("data: ")), "and no [DONE]"


@in_event_loop
async def test_error_names_the_field_that_was_sent() -> None:
    async with parrot() as (_, client, _):
        for name, value in (("best_of", 2), ("logprobs", 0)):
            answer = await client.post("/v1/completions", json={"prompt": "a", name: value})
            assert answer.json()["error"]["param"] == name
            assert answer.json()["error"]["message"].startswith(f"{name}: this worker")


@in_event_loop
async def test_overload_and_the_end_of_the_service_are_503(gate: Gate) -> None:
    async with parrot(gate, max_pending=1) as (service, _, completions):
        asked: dict[str, Any] = {"model": "any", "prompt": "WAIT"}
        running = [asyncio.create_task(completions.create(**asked)) for _ in range(40)]
        done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            error = task.exception()
            assert isinstance(error, openai.InternalServerError)
            assert (error.status_code, error.code) == (503, "overloaded")
            assert int(error.response.headers["retry-after"]) >= 1
        service.stop()
        with pytest.raises(openai.InternalServerError) as caught:
            await completions.create(**asked)
        assert (caught.value.status_code, caught.value.code) == (503, "unavailable")
        gate.let_through(100)
        await asyncio.gather(*running, return_exceptions=True)


@in_event_loop
async def test_stream_of_several_prompts_fails_when_one_of_them_does() -> None:
    async with parrot() as (service, client, completions):
        with pytest.raises(openai.APIError) as caught:
            await read(completions, ["a " * 1000, "b REFUSE"], [])
        assert caught.value.type == "invalid_request_error"
        assert not service.streams
        assert (await client.get("/stats")).json()["streams"]["open"] == 0


@in_event_loop
async def test_streams_of_several_prompts_are_closed_when_one_cannot_be_opened(gate: Gate) -> None:
    async def pending() -> int:
        return int((await client.get("/stats")).json()["queue"]["pending"])

    async with parrot(gate, max_pending=3) as (_, client, completions):

        def ask(prompt: Any) -> asyncio.Task[Any]:
            return asyncio.create_task(completions.create(model="any", prompt=prompt, stream=True))

        waiting = [ask("WAIT")]
        await asyncio.to_thread(gate.await_arrival)
        while await pending() < 2:  # the scheduler sends some ahead
            waiting.append(ask("WAIT"))
            await asyncio.sleep(0)
        before = await pending()
        with pytest.raises(openai.InternalServerError) as caught:
            await ask(["a", "b", "c"])
        assert caught.value.code == "overloaded"
        while await pending() > before:
            """It is given up in the thread of the streamer."""
        gate.let_through(100)
        for each in waiting:
            assert [chunk async for chunk in await each]
