"""The page and the documentation in Chromium, used as people do; servers run as users run them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from cases import long_cases
from conftest import await_that
from serve_process import ROOT, Serving, key_table
from service_streamer.testing import Gate
from tiny_models import folder

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

    Visit = Callable[..., Page]

# Playwright has an event loop of its own, which gevent does not suit.
pytestmark = [pytest.mark.no_gevent, pytest.mark.xdist_group("page")]

TIMEOUT = 120  # seconds, for whatever never takes so long
PHONE = {"width": 375, "height": 760}
DESKTOP = {"width": 1280, "height": 900}
KEY = "a-key-that-nobody-guesses"

#: The first of the texts on a page that is too pale on what is behind it, with its contrast.
PALE = """() => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = (rgb) => {
    const [r, g, b] = rgb.slice(0, 3).map((c) => c / 255)
      .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = rgba(getComputedStyle(at).backgroundColor);
      if (colour[3] === 255) return colour;
    }
    return [255, 255, 255, 255];
  };
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    if (!own || !element.checkVisibility() || element.disabled) continue;
    const pair = [light(rgba(getComputedStyle(element).color)), light(behind(element))];
    const contrast = (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
    if (contrast < 4.5) return `${element.outerHTML.slice(0, 120)}: ${contrast.toFixed(2)}`;
  }
  return null;
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    try:
        from playwright import sync_api
    except ImportError:
        path = None
    if path is None:
        pytest.skip("the tests of the page need chromium and the package playwright")
    sync_api.expect.set_options(timeout=500 * TIMEOUT)
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox"], timeout=1000 * TIMEOUT
        )
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def shipped(browser: Browser) -> Iterator[Serving]:
    with Serving() as service:
        yield service


@pytest.fixture(scope="module")
def generating(browser: Browser) -> Iterator[Serving]:
    with Serving(str(ROOT / "example" / "models" / "text_generation")) as service:
        yield service


@pytest.fixture
def visit(browser: Browser) -> Iterator[Visit]:
    """Opens pages, each as a new visitor; what goes wrong in them fails the test at its end."""
    wrong: list[str] = []
    with contextlib.ExitStack() as stack:

        def visit(url: str, scheme: str = "light", size: dict[str, int] = DESKTOP) -> Page:
            context = browser.new_context(color_scheme=scheme, viewport=size)  # type: ignore[arg-type]
            stack.callback(context.close)
            context.set_default_timeout(1000 * TIMEOUT)
            page = context.new_page()
            host = urlsplit(url).netloc
            page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
            page.on("console", lambda message: _note_console(message, wrong))
            page.on("request", lambda request: _note_request(request, host, wrong))
            page.on("response", lambda answer: _note_response(answer, wrong))
            page.goto(url)
            return page

        yield visit
    assert wrong == []


def _note_console(message: Any, wrong: list[str]) -> None:
    # Chromium reports each refusal and each server that is gone, and the tests provoke them.
    if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
        wrong.append(f"console: {message.text}")


def _note_request(request: Any, host: str, wrong: list[str]) -> None:
    parts = urlsplit(request.url)
    if parts.scheme not in ("data", "blob") and parts.netloc != host:
        wrong.append(f"a request to elsewhere: {request.url}")


def _note_response(answer: Any, wrong: list[str]) -> None:
    if answer.status in (404, 405):
        wrong.append(f"{answer.status} of {answer.url}")


def expect(page: Page, selector: str) -> Any:
    from playwright.sync_api import expect

    return expect(page.locator(selector))


def send(page: Page, text: str) -> None:
    page.fill("#input", text)
    page.click("#send")


# -- The playground -------------------------------------------------------------------------------


def test_a_prediction_shows_the_words_with_their_scores(shipped: Serving, visit: Visit) -> None:
    page = visit(shipped.url)
    expect(page, "#model").to_have_text("text_infilling")
    expect(page, "#facts").to_have_text(re.compile("fill-mask.* cpu .*version"))
    expect(page, "#light-text").to_have_text("ready")
    expect(page, "#stream-field").to_be_hidden()  # the model makes no steps
    assert "[MASK]" in page.input_value("#input")
    send(page, "Happy birthday to [MASK].")
    expect(page, "#outcome").to_contain_text("200 OK in")
    expect(page, "#result .bars .word").to_have_count(5)
    expect(page, ".sentence").to_have_text("Happy birthday to you.")
    widths = page.eval_on_selector_all(
        "#result .fill", "fills => fills.map((fill) => parseFloat(fill.style.width))"
    )
    assert widths == sorted(widths, reverse=True)
    assert widths[0] > 50
    page.locator("#result .bar").nth(1).click()
    second = page.locator("#result .word").nth(1).inner_text()
    expect(page, ".sentence").to_have_text(f"Happy birthday to {second}.")
    assert page.locator("#result [aria-pressed=true]").count() == 1
    send(page, "twinkle twinkle [MASK] [MASK]")  # each gap has its words
    expect(page, "#result .bars").to_have_count(2)
    page.locator("#result .bars").nth(1).locator("button").nth(2).click()
    words = page.locator("#result .bars").nth(1).locator(".word").all_inner_texts()
    expect(page, ".sentence mark >> nth=1").to_have_text(words[2])
    send(page, 'it\'s a [MASK] of "mine"')
    expect(page, "#result .bars .word").to_have_count(5)
    line = page.locator("#curl").inner_text()
    run = subprocess.run(["bash", "-c", f"{line} --silent"], capture_output=True, text=True)
    answered = [word["token_str"] for word in json.loads(run.stdout)]
    assert answered == page.locator("#result .word").all_inner_texts()


def test_parameters_come_from_the_schema_and_what_is_wrong_is_told_at_its_field(
    shipped: Serving, visit: Visit
) -> None:
    page = visit(shipped.url)
    page.click("#advanced summary")
    page.fill("#field-top_k", "3")
    page.fill("#field-timeout", "20")
    page.click("#send")
    expect(page, "#result .bars .word").to_have_count(3)
    expect(page, "#curl").to_contain_text('"parameters":{"top_k":3}')
    expect(page, "#curl").to_contain_text("X-Request-Timeout: 20")
    send(page, "Happy birthday")
    expect(page, "#input-error").to_contain_text("[MASK]")
    expect(page, "#input").to_have_attribute("aria-invalid", "true")
    expect(page, "#input").to_be_focused()
    send(page, "Happy birthday to [MASK].")
    expect(page, "#result .bars .word").to_have_count(3)
    expect(page, "#input-error").to_be_empty()
    page.fill("#field-top_k", "-1")
    page.click("#send")
    expect(page, "#error-top_k").to_contain_text("top_k")
    expect(page, "#field-top_k").to_be_focused()


@pytest.mark.long
def test_everything_can_be_done_with_the_keyboard(shipped: Serving, visit: Visit) -> None:
    page = visit(shipped.url)
    expect(page, "#send").to_be_enabled()
    page.keyboard.press("Tab")
    expect(page, ".skip").to_be_focused()
    page.keyboard.press("Enter")
    expect(page, "#playground").to_be_focused()
    page.keyboard.press("Tab")
    assert "Insert [MASK]" in tab_stop(page)
    page.keyboard.press("Tab")
    expect(page, "#input").to_be_focused()
    page.keyboard.press("Control+A")
    page.keyboard.type("Happy birthday to [MASK].")
    page.keyboard.press("Control+Enter")
    expect(page, ".sentence").to_have_text("Happy birthday to you.")
    stops = []
    while "bar" not in (stop := tab_stop(page)).split():
        stops.append(stop)
        page.keyboard.press("Tab")
        assert len(stops) < 10
    page.keyboard.press("Tab")
    page.keyboard.press("Space")
    second = page.locator("#result .word").nth(1).inner_text()
    expect(page, ".sentence").to_have_text(f"Happy birthday to {second}.")


def tab_stop(page: Page) -> str:
    """The class and the text of what has the focus, which must be seen to have it."""
    outline, told = page.evaluate(
        """() => {
          const at = document.activeElement;
          return [getComputedStyle(at).outlineStyle, `${at.className} ${at.textContent.trim()}`];
        }"""
    )
    assert outline != "none", told
    return str(told)


def test_outputs_of_a_stream_are_shown_as_they_come(gate: Gate, visit: Visit) -> None:
    with Serving("served_models:Counting", TEST_GATE=str(gate.__getstate__())) as service:
        page = visit(service.url)
        expect(page, "#stream").to_be_checked()
        gate.let_through(2)
        send(page, "4")
        expect(page, ".outputs li").to_have_text(["1", "2"])  # the third step waits for us
        expect(page, "#pace").to_have_text(
            re.compile(r"^2 outputs(, [\d.]+/s)?, the first after .* m?s$")
        )
        expect(page, "#result").to_have_attribute("aria-busy", "true")
        gate.let_through(2)
        expect(page, "#outcome").to_contain_text("200 OK in")
        expect(page, ".outputs li").to_have_text(["1", "2", "3", "4"])
        expect(page, "#curl").to_contain_text("curl -N -X POST")
        expect(page, "#curl").to_contain_text('"stream":true')
        gate.let_through(2)
        send(page, '{"n": 2, "size": 3}')  # texts are joined
        expect(page, ".completion").to_have_text("xxxxxx")
        gate.let_through(2)
        send(page, '{"n": 4, "raise_at": 2}')
        expect(page, "#problem").to_contain_text("The stream failed after these outputs.")
        expect(page, "#outcome").to_contain_text("Failed after")
        send(page, '{"n": 1, "invalid": "inputs: too long"}')
        expect(page, "#input-error").to_have_text("inputs: too long")
        page.uncheck("#stream")
        gate.let_through(2)
        send(page, "2")
        expect(page, "#result .json").to_contain_text("2")
        page.check("#stream")
        gate.let_through(1)
        send(page, "1000000000")
        expect(page, ".outputs li").to_have_text(["1"])
        expect(page, "#in-flight").to_have_text("1")
        page.click("#send")  # Cancel
        expect(page, "#outcome").to_have_text("Cancelled")

        def is_left() -> bool:
            gate.let_through(1)  # the worker hears of it between two steps, and it may be late
            return page.inner_text("#in-flight") == "0"

        await_that(is_left)


def test_a_chat_is_streamed(generating: Serving, visit: Visit) -> None:
    page = visit(generating.url)
    expect(page, "#input-label").to_have_text("Message")
    page.click("#advanced summary")
    page.fill("#field-temperature", "0")
    said = ["Mary had a little lamb,", "Happy birthday to you, happy birthday to you,"]
    for number, message in enumerate(said):
        send(page, message)
        expect(page, ".turn").to_have_count(2 * number + 2)
        expect(page, "#outcome").to_contain_text("200 OK in")
        expect(page, "#input").to_have_value("")
        expect(page, "#pace").to_have_text(
            re.compile(r"^[0-9]+ tokens(, [\d.]+/s)?, the first after .* m?s$")
        )
    expect(page, ".turn.user .completion").to_have_text(said)
    answer = page.locator(".turn .completion").nth(1).inner_text()
    assert "fleece" in answer, "the second message went with all that was said before"
    send(page, "And then?")
    expect(page, "#outcome").to_contain_text("200 OK in")
    told = json.loads(page.locator("#curl").inner_text().split("-d '")[1][:-1])
    assert [each["role"] for each in told["messages"]] == 2 * ["user", "assistant"] + ["user"]
    assert (told["temperature"], told["stream"]) == (0, True)
    page.uncheck("#stream")
    send(page, said[0])
    expect(page, ".turn").to_have_count(8)
    page.click("#new-chat")
    expect(page, ".turn").to_have_count(0)
    send(page, said[0])
    expect(page, ".turn").to_have_count(2)
    send(page, " ")
    expect(page, "#input-error").to_have_text("Write a message first.")
    page.check("input[value=text]")
    expect(page, "#input-label").to_have_text("Prompt")
    page.check("#stream")
    page.select_option("#field-do_sample", "false")
    send(page, "Mary had a little")
    expect(page, ".stream .completion").to_contain_text("Mary had a little lamb")


#: Holds answers of chats behind their first part, until release() is called.
HOLD = """() => {
  const real = window.fetch;
  const released = new Promise((resolve) => { window.release = resolve; });
  window.fetch = async (path, options) => {
    const response = await real(path, options);
    if (!path.includes("chat")) return response;
    const held = new TransformStream({
      async transform(part, to) { to.enqueue(part); await released; },
    });
    return new Response(response.body.pipeThrough(held), response);
  };
}"""


#: The service loads a model, and has loaded it.
RESTARTED = """async (model) => {
  const { showTask } = await import(new URL("static/playground.js", document.baseURI));
  const info = await (await fetch("info")).json();
  await showTask({ ...info, model, task: null });
  await showTask({ ...info, model });
}"""


def test_what_ends_a_chat(generating: Serving, visit: Visit) -> None:
    page = visit(generating.url)
    send(page, "Mary had a little lamb,")
    expect(page, "#outcome").to_contain_text("200 OK in")
    page.evaluate(HOLD)
    send(page, "And then?")
    expect(page, ".turn").to_have_count(4)
    page.click("#new-chat")
    page.evaluate("release()")
    expect(page, "#outcome").to_have_text("Cancelled")
    expect(page, ".turn").to_have_count(0)
    page.fill("#input", "Hello")
    assert chat_of(page) == [("user", "Hello")], "what came late belongs to no chat"
    empty = {"choices": [{"message": {"content": ""}}]}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(json=empty))
    page.uncheck("#stream")
    send(page, "Hello")
    expect(page, "#outcome").to_contain_text("200 OK in")
    page.fill("#input", "Again")
    assert chat_of(page) == [("user", "Hello"), ("assistant", ""), ("user", "Again")]
    for model, count in (("text_generation", 3), ("another", 1)):
        page.evaluate(RESTARTED, model)
        page.fill("#input", "Again")
        assert len(chat_of(page)) == count


def chat_of(page: Page) -> list[tuple[str, str]]:
    """The messages that would be sent."""
    told = json.loads(page.locator("#curl").inner_text().split("-d '")[1][:-1])
    return [(each["role"], each["content"]) for each in told["messages"]]


@pytest.fixture(scope="module")
def t5() -> str:
    return str(folder("t5"))  # of the module: transformers leaves a thread


def test_a_text_that_is_made_of_another_one(t5: str, visit: Visit) -> None:
    with Serving(t5) as service:
        page = visit(service.url)
        send(page, "the sun")
        expect(page, "#outcome").to_contain_text("200 OK in")
        expect(page, ".stream .completion").to_have_text(re.compile("."))
        assert not page.locator(".stream .completion").inner_text().startswith("the sun")


# -- The live figures -----------------------------------------------------------------------------


def test_the_dashboard_moves(shipped: Serving, visit: Visit) -> None:
    page = visit(shipped.url)
    expect(page, "#total-answered").to_have_text(re.compile(r"^\d+$"))
    before = int(page.locator("#total-answered").inner_text())
    for _ in range(3):
        assert shipped.predict(2 * ["Happy birthday to [MASK]."]).status_code == 200
    # Not exactly: a page's first figures are up to a second old, and may miss an earlier answer.
    page.wait_for_function(
        "least => Number(document.querySelector('#total-answered').textContent) >= least",
        arg=before + 3,
    )
    expect(page, "#spark").to_have_attribute("aria-label", re.compile(r"at most (?!0$)[\d.]+"))
    expect(page, "#p50").to_have_text(re.compile(r"\d+ m?s"))
    expect(page, "#batches").to_have_attribute("aria-label", re.compile(r"of up to \d+$"))
    expect(page, "#why li >> nth=0").to_have_text(re.compile(r"^Recently: \d+ batch"))
    expect(page, "#workers tbody tr").to_have_count(1)
    expect(page, "#workers tbody tr").to_contain_text("CPU")
    expect(page, "#workers tbody tr").to_contain_text("idle")
    expect(page, "#banners").to_have_text("All is well: 1 worker ready.")


@pytest.mark.long
def test_an_overload_is_shown(gate: Gate, visit: Visit) -> None:
    arguments = ("served_models:Obedient", "--max-pending", "1", "--batch-size", "1")
    with (
        Serving(*arguments, TEST_GATE=str(gate.__getstate__())) as service,
        ThreadPoolExecutor(6) as pool,
    ):
        page = visit(service.url)
        expect(page, "#banners").to_contain_text("All is well")
        try:
            calls = [pool.submit(service.predict, "wait") for _ in range(6)]
            gate.await_arrival()
            expect(page, "#pending").to_have_text("1")
            expect(page, "#queue-bar").to_have_class(re.compile("full"))
            send(page, '"me, too"')
            expect(page, "#outcome").to_contain_text("503")
            expect(page, "#problem").to_contain_text("Overloaded")
            expect(page, "#problem .retry").to_have_text(re.compile("Retry in|tried again"))
            alert = '#banners [role="alert"]'
            expect(page, alert).to_contain_text("Requests are being refused: overloaded")
            expect(page, "#rejected").to_contain_text("overloaded")
        finally:
            gate.let_through(6)
        assert {call.result().status_code for call in calls} == {200, 503}
        expect(page, "#pending").to_have_text("0")
        expect(page, "#banners").to_have_text("All is well: 1 worker ready.")
        send(page, '"me, too"')
        expect(page, "#result").to_contain_text("me, too")


@pytest.mark.long
def test_a_dead_worker_is_shown(gate: Gate, visit: Visit) -> None:
    gate.let_through()
    with Serving("served_models:Late", TEST_GATE=str(gate.__getstate__())) as service:
        gate.await_arrival()
        page = visit(service.url)
        [worker] = service.workers()
        os.kill(worker, signal.SIGKILL)
        gate.await_arrival()
        expect(page, "#banners").to_contain_text("Worker 0 died and is being restarted.")
        expect(page, "#banners").to_contain_text("No worker is ready")
        expect(page, "#light-text").to_have_text("not ready")
        gate.let_through()
        expect(page, "#light-text").to_have_text("ready")
        expect(page, "#banners").to_contain_text("Worker 0 died and was restarted.")
        expect(page, "#workers tbody tr >> td >> nth=-1").to_have_text("1")
        expect(page, "#total-restarts").to_have_text("1")


@pytest.mark.long
def test_a_server_that_is_gone_is_shown_until_it_is_back(visit: Visit) -> None:
    with socket.socket() as kept:  # nobody else gets the port meanwhile
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))
        port = ("--port", str(kept.getsockname()[1]))
        with Serving("served_models:Obedient", *port) as service:
            page = visit(service.url)
            expect(page, "#light-text").to_have_text("ready")
            expect(page, "#total-requests").to_be_visible()
        expect(page, "#light-text").to_have_text("unreachable")
        expect(page, "#banners").to_contain_text("does not answer")
        page.click("#send")
        expect(page, "#problem").to_contain_text("cannot be reached")
        with Serving("served_models:Obedient", *port):
            expect(page, "#light-text").to_have_text("ready")
            page.click("#send")
            expect(page, "#outcome").to_contain_text("200 OK")


# -- The API key ----------------------------------------------------------------------------------


def test_the_api_key_is_asked_for(visit: Visit) -> None:
    with Serving("served_models:Obedient", SERVICE_STREAMER_API_KEY=KEY) as service:
        page = visit(service.url)
        expect(page, "#key-note").to_have_text("The server asks for an API key.")
        expect(page, "#banners").to_contain_text("need the API key")
        send(page, '"hello"')
        expect(page, "#problem").to_contain_text("An API key is needed")
        expect(page, "#key-input").to_be_focused()
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        expect(page, "#key-note").to_have_text("The server does not know this key.")
        page.fill("#key-input", KEY)
        page.keyboard.press("Enter")
        expect(page, "#result").to_contain_text("hello")
        expect(page, "#banners").to_contain_text("All is well")
        expect(page, "#key-form").to_be_hidden()
        assert KEY not in page.locator("#curl").inner_text()
        page.reload()
        expect(page, "#banners").to_contain_text("All is well")
        page.click("#forget")
        expect(page, "#key-form").to_be_visible()


def test_a_key_for_the_model_only_works_without_the_figures(tmp_path: Path, visit: Visit) -> None:
    keys = tmp_path / "keys.toml"
    alice, watcher = (key_table(name, f"{KEY}-{name}", "", [scope]) for name, scope in
                      (("alice", "compute"), ("watcher", "metrics")))  # fmt: skip
    keys.write_text(alice + watcher)
    keys.chmod(0o600)
    with Serving("served_models:Obedient", "--api-key-file", str(keys)) as service:
        page = visit(service.url)
        page.fill("#key-input", f"{KEY}-alice")
        page.keyboard.press("Enter")
        expect(page, "#banners").to_have_text(
            "The live figures need a key with the scope metrics. This key does not have it."
        )
        expect(page, "#light-text").to_have_text("ready")
        send(page, '"hello"')
        expect(page, "#result").to_contain_text("hello")
        page.click("#forget")
        page.fill("#key-input", f"{KEY}-watcher")
        page.keyboard.press("Enter")
        expect(page, "#banners").to_contain_text("All is well")
        send(page, '"hello"')
        expect(page, "#outcome").to_contain_text("403 Forbidden")
        expect(page, "#problem").to_contain_text("does not have the scope compute")


# -- How it looks ---------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", *long_cases("dark")])
@pytest.mark.parametrize("size", [DESKTOP, *long_cases(PHONE)], ids=["desktop", "phone"])
@pytest.mark.parametrize("path", ["/", *long_cases("/docs")])
def test_it_fits_and_can_be_read(
    shipped: Serving, visit: Visit, scheme: str, size: dict[str, int], path: str
) -> None:
    page = visit(shipped.url + path, scheme, size)
    if path == "/":
        page.click("#advanced summary")
        send(page, "this little [MASK] went to the [MASK]")
        expect(page, "#result .bars").to_have_count(2)
        expect(page, "#figures:not(.stale)").to_be_visible()
    else:
        page.locator("#post-predict form.try button.primary").click()
        expect(page, "#post-predict .answer .head").to_contain_text(" in ")
    page.evaluate("Promise.allSettled(document.getAnimations().map((each) => each.finished))")
    assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
    assert page.evaluate(PALE) is None
    assert page.evaluate("getComputedStyle(document.documentElement).colorScheme") == "light dark"


# -- The documentation ----------------------------------------------------------------------------


def test_the_documentation_has_every_endpoint_and_tries_it(shipped: Serving, visit: Visit) -> None:
    api = shipped.client.get("/openapi.json").json()
    page = visit(f"{shipped.url}/docs")
    expect(page, ".endpoint").to_have_count(sum(len(item) for item in api["paths"].values()))
    links = page.locator(".index a").all_inner_texts()
    for path in api["paths"]:
        assert sum(link.split()[-1] == path for link in links) == len(api["paths"][path])
    predict = page.locator("#post-predict")
    for word in ("inputs", "top_k", "X-Request-Timeout", "422", "503", "curl -X POST"):
        assert word in predict.inner_text()
    said = "The answer and the log repeat it. At most 128 characters."
    assert said in predict.inner_text(), "sentences"
    page.fill("#post-predict-body", '{"inputs": "Happy birthday to [MASK]."}')
    page.locator("#post-predict form.try button.primary").click()
    expect(page, "#post-predict .answer .head").to_contain_text("200 in")
    expect(page, "#post-predict .answer .json").to_contain_text('"token_str": "you"')
    page.fill("#post-predict-body", "{")
    page.locator("#post-predict form.try button.primary").click()
    expect(page, "#post-predict .answer .head").to_contain_text("400 in")
    page.locator("#get-health-ready form.try button.primary").click()
    expect(page, "#get-health-ready .answer .json").to_contain_text('"ready"')
