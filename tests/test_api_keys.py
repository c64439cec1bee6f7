"""API keys from a file: what it says, scopes, limits, and that it is read again."""

from __future__ import annotations

import hashlib
import os
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from serve_process import ROOT, Serving, run, until
from service_streamer.serve.http.api_keys import (
    SCOPES,
    ApiKey,
    check_key_name,
    key_table,
    new_key,
    read_keys,
)
from service_streamer.serve.http.keyring import Keyring
from service_streamer.serve.http.quotas import Quota, Shortage, new_cells
from service_streamer.serve.http.refusals import Refusal
from service_streamer.serve.http.shared_cells import SLOTS, SharedCells, cells_needed
from service_streamer.serve.http.token_usage import (
    CountedForm,
    StreamTokens,
    estimated,
    tokens_used,
)
from service_streamer.testing import Gate

pytestmark = pytest.mark.no_gevent

KINDS = "served_models:kinds"


def table(name: str, key: str, more: str = "", scopes: str = '["compute"]') -> str:
    digest = hashlib.sha256(key.encode()).hexdigest()
    return f'[{name}]\nhash = "sha256:{digest}"\nscopes = {scopes}\n{more}\n'


# -- the file


def test_a_file_of_keys() -> None:
    limits = "requests-per-minute = 60\ntokens-per-minute = 9\nconcurrency = 2"
    text = table("alice", "a", f"{limits}\nexpires = 1970-01-02T00:00:00Z")
    text += f'[bob]\nhash = "sha256:{hashlib.sha256(b"b").hexdigest()}"\n'
    assert [*read_keys(text).values()] == [
        ApiKey("alice", frozenset(("compute",)), 60, 9, 2, 86400.0),
        ApiKey("bob", frozenset(("compute",))),
    ]
    assert read_keys("") == {}


def test_the_file_of_the_documentation() -> None:
    page = (ROOT / "docs" / "howto" / "security.md").read_text()
    [text] = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    [key] = read_keys(text).values()
    assert key.name == "alice"
    assert key.has_limits
    assert key.expires is not None


HASH = f'hash = "sha256:{"0" * 64}"'


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[a", "not valid TOML"),
        ("[a]", "[a] needs hash ="),
        ("[a]\nhash = 3", "[a] needs hash ="),
        (f"[a]\n{HASH.upper()}", "unknown field 'HASH'"),
        (f'[a]\nhash = "sha256:{"0" * 63}"', "64 lower-case hexadecimal digits"),
        ("a = 3", "'a' must be in the table of a key"),
        (f'["a b"]\n{HASH}', "the name 'a b'"),
        (f'["a\\n"]\n{HASH}', "the name 'a\\n'"),
        (f"[{'a' * 65}]\n{HASH}", "at most 64 characters"),
        (f"[a]\n{HASH}\nscope = []", "did you mean scopes?"),
        (f"[a]\n{HASH}\nscopes = []", "scopes must be a list"),
        (f'[a]\n{HASH}\nscopes = ["root"]', "compute, metrics, admin"),
        (f"[a]\n{HASH}\nscopes = [[1]]", "scopes must be a list"),
        (f"[a]\n{HASH}\nconcurrency = 0", "concurrency must be a whole number of at least 1"),
        (f"[a]\n{HASH}\nrequests-per-minute = true", "requests-per-minute must be"),
        (f"[a]\n{HASH}\nrequests_per_minute = 1", "did you mean requests-per-minute?"),
        (f'[a]\n{HASH}\nexpires = "2027-01-01"', "unquoted"),
        (f"[a]\n{HASH}\nexpires = 2027-01-01T00:00:00", "with its offset"),
        (f"[a]\n{HASH}\n[b]\n{HASH}", "[b] has the hash of [a]"),
        pytest.param(
            "".join(f"[k{number}]\n" for number in range(2001)), "at most 2000", id="too many"
        ),
        pytest.param(f"[a]\nhash = {'[' * 100_000}", "nested too deeply", id="too deep"),
        pytest.param(f"[a]\n{HASH}\nconcurrency = {1 << 60}", "must be at most", id="too large"),
    ],
)
def test_what_is_no_file_of_keys(text: str, problem: str, wording: Callable[..., None]) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)) as caught:
        read_keys(text)
    assert "\n" not in str(caught.value)
    wording(caught.value)


@pytest.mark.parametrize("name", ["alice", "team@example.com", "a.b"])
def test_a_new_key_is_found_by_its_table(name: str) -> None:
    key = new_key()
    assert len(key) > 40
    assert key != new_key()
    text = key_table(check_key_name(name), key, ("compute", "admin"))
    assert key not in text
    [found] = read_keys(text).values()
    assert found == ApiKey(name, frozenset(("compute", "admin")))


# -- limits


def test_requests_flow_in_again() -> None:
    quota = Quota(ApiKey("a", requests_per_minute=60), new_cells())
    assert [quota.enter(100.0) for _ in range(60)] == [None] * 60, "those of a minute at once"
    assert quota.enter(100.0) == Shortage("requests-per-minute = 60", 1)
    assert quota.enter(100.5) == Shortage("requests-per-minute = 60", 1)
    assert quota.enter(101.0) is None
    assert quota.enter(101.0) is not None
    assert [quota.enter(1000.0) for _ in range(61)].count(None) == 60, "and no more than those"


@pytest.mark.parametrize("rate", [1, 7, 599, 100_003])
def test_no_request_is_lost_to_rounding(rate: int) -> None:
    quota = Quota(ApiKey("a", requests_per_minute=rate), new_cells())
    for now in (12345.678, 99999.1):
        admitted = [quota.enter(now) for _ in range(rate + 1)]
        assert admitted.count(None) == rate


def test_one_request_a_minute() -> None:
    quota = Quota(ApiKey("a", requests_per_minute=1), new_cells())
    assert quota.enter(5.0) is None
    assert quota.enter(15.5) == Shortage("requests-per-minute = 1", 50)
    assert quota.enter(65.0) is None


def test_tokens_are_taken_afterwards() -> None:
    quota = Quota(ApiKey("a", tokens_per_minute=600), new_cells())
    assert quota.enter(0.0) is None
    quota.charge(599, 0.0)
    assert quota.enter(0.0) is None, "one is left"
    quota.charge(1201, 0.0)
    assert quota.enter(0.0) == Shortage("tokens-per-minute = 600", 121)
    assert quota.enter(119.0) == Shortage("tokens-per-minute = 600", 2)
    assert quota.enter(120.2) is None
    quota.charge(0, 120.2)
    quota.charge(-5, 120.2)
    assert quota.enter(120.2) is None


def test_a_number_of_tokens_that_no_float_has() -> None:
    quota = Quota(ApiKey("alice", tokens_per_minute=1), new_cells())
    quota.charge(10**400, 0.0)
    assert quota.enter(0.0) is not None


def test_open_requests() -> None:
    quota = Quota(ApiKey("a", concurrency=2), new_cells())
    assert [quota.enter(0.0) for _ in range(3)] == [
        None, None, Shortage("concurrency = 2", 1),
    ]  # fmt: skip
    quota.leave()
    assert quota.enter(0.0) is None


def test_a_refused_request_costs_nothing() -> None:
    quota = Quota(ApiKey("a", requests_per_minute=2, concurrency=1), new_cells())
    assert quota.enter(0.0) is None
    for _ in range(10):
        assert quota.enter(0.0) == Shortage("concurrency = 1", 1)
    quota.leave()
    assert quota.enter(0.0) is None


def test_new_limits_keep_what_was_used() -> None:
    quota = Quota(ApiKey("a", requests_per_minute=60, concurrency=1), new_cells())
    assert quota.enter(0.0) is None
    wider = quota.renewed(ApiKey("a", requests_per_minute=60, concurrency=2))
    assert wider.enter(0.0) is None
    assert wider.enter(0.0) == Shortage("concurrency = 2", 1)
    quota.leave()  # the request that was admitted before
    assert wider.enter(0.0) is None


def test_processes_share_limits() -> None:
    array = get_context("spawn").RawArray("d", cells_needed(3))
    key = ApiKey("a", requests_per_minute=3, concurrency=2)
    shared = [SharedCells(array, number, 3) for number in range(3)]
    quotas = [Quota(key, each.of(b"k" * 32), each.number) for each in shared]
    assert quotas[0].enter(0.0) is None
    assert quotas[1].enter(0.0) is None
    assert quotas[2].enter(0.0) == Shortage("concurrency = 2", 1)
    quotas[0].leave()
    assert quotas[2].enter(0.0) is None
    quotas[2].leave()
    assert quotas[0].enter(0.0) == Shortage("requests-per-minute = 3", 20)
    # Process 1 has died with an open request, and another one has its number.
    again = SharedCells(array, 1, 3)
    assert [*again.of(b"k" * 32)][2:] == [0.0, 0.0, 0.0]
    assert Quota(key, again.of(b"k" * 32), 1).enter(20.0) is None


def test_each_key_has_a_slot_of_its_own() -> None:
    array = get_context("spawn").RawArray("d", cells_needed(1))
    shared = SharedCells(array, 0, 1)
    digests = [number.to_bytes(6) + b"same" for number in range(SLOTS)]
    for number, digest in enumerate(digests):
        shared.of(digest)[0] = number
    assert [shared.of(digest)[0] for digest in digests] == [*range(SLOTS)]
    late = shared.of(b"too many" * 4)
    late[0] = 5.0
    assert shared.of(b"too many" * 4)[0] == 0.0, "without a slot a process counts for itself"


# -- tokens


@pytest.mark.parametrize(
    ("task", "items", "outputs", "tokens"),
    [
        ("feature-extraction", ["a", "b"], [{"embedding": [], "tokens": 3}, {"tokens": 4}], 7),
        (
            "text-generation",
            ["a"],
            [[{"text": "", "prompt_tokens": 5, "completion_tokens": 2}, {"completion_tokens": 3}]],
            10,
        ),
        ("text-generation", ["a" * 8], [[{"generated_text": "b" * 4}]], 3),
        ("text-classification", ["a" * 8, "b" * 8], [{"label": "x" * 100}], 4),
        ("image-classification", [b"abc"], [[{"label": "cat"}]], 0),
        (None, ["a" * 8, 3, {"text": "bbbb"}], [1, 2, 3], 3),
        (None, [3], [{"tokens": "many"}], 0),
        (None, ["a" * 8], [{"tokens": 0}], 2),
        ("custom", ["a" * 8], [{"tokens": 10**400}], 2),
    ],
)
def test_tokens_of_a_request(task: Any, items: Any, outputs: Any, tokens: float) -> None:
    assert tokens_used({"task": task}, items, outputs) == tokens


def test_tokens_of_a_stream() -> None:
    class Form:
        def output(self, output: Any) -> bytes:
            return b"x"

        def end(self) -> bytes:
            return b""

    tokens = StreamTokens(estimated({"task": "text-generation"}, ["a" * 40]))
    form = CountedForm(Form(), tokens)
    assert form.output({"text": "a"}) + form.output("b") == b"xx"
    assert tokens.total == 12, "who leaves pays for what was computed"
    last = {"completion_tokens": 7, "prompt_tokens": 3}
    form.output({"choices": [last, {**last, "completion_tokens": 2}]})
    assert tokens.total == 12
    form.output({"completion_tokens": 1, "prompt_tokens": "three"})
    assert tokens.total == 13


# -- the keyring


def bearer(key: str) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", b"Bearer " + key.encode())]


def refused(keyring: Keyring, key: str, scope: str | None = "compute") -> int:
    """The status; 200 if the key is let in."""
    try:
        keyring.authorize(bearer(key), scope)
    except Refusal as refusal:
        return refusal.status
    return 200


def replace(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    new.rename(path)


def test_keys_of_the_command_line_have_all_scopes_but_admin() -> None:
    keyring = Keyring(("one", "two"))
    assert {scope: refused(keyring, "one", scope) for scope in SCOPES} == {
        "compute": 200, "metrics": 200, "admin": 403,
    }  # fmt: skip
    assert keyring.authorize(bearer("two"), None).tenant == "key 2"
    assert Keyring(("one",)).authorize(bearer("one"), None).tenant == ""


def test_scopes_are_kept_apart(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text("".join(table(each, each, "", f'["{each}"]') for each in SCOPES))
    keyring = Keyring(("given",), path)
    for key in SCOPES:
        assert refused(keyring, key, None) == 200
        for scope in SCOPES:
            assert refused(keyring, key, scope) == (200 if key == scope else 403)
    assert keyring.authorize(bearer("compute"), "compute").tenant == "compute"
    assert keyring.authorize(bearer("given"), "compute").tenant == "key 1"
    with pytest.raises(Refusal, match="'metrics' does not have the scope admin"):
        keyring.authorize(bearer("metrics"), "admin")


@pytest.mark.parametrize(
    ("headers", "is_in"),
    [
        ([(b"x-api-key", b"right")], True),
        ([(b"authorization", b"bEaReR  right ")], True),
        ([(b"authorization", b"Basic right")], False),
        ([(b"x-api-key", b"right"), (b"authorization", b"Bearer wrong")], True),
        ([(b"x-api-key", b"wrong"), (b"authorization", b"Bearer right")], False),
        ([(b"x-api-key", b"")], False),
        ([(b"x-api-key", hashlib.sha256(b"right").digest())], False),
        ([(b"x-api-key", hashlib.sha256(b"right").hexdigest().encode())], False),
        ([(b"x-api-key", b"\xff")], False),
        ([], False),
    ],
)
def test_where_a_key_may_be(headers: list[tuple[bytes, bytes]], is_in: bool) -> None:
    keyring = Keyring(("right",))
    if is_in:
        keyring.authorize(headers, None)
    else:
        with pytest.raises(Refusal, match=r"(wrong|missing) API key"):
            keyring.authorize(headers, None)


def test_the_file_is_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(table("alice", "a"))
    keyring = Keyring((), path)
    assert refused(keyring, "a") == 200
    replace(path, table("bob", "b"))
    keyring.look()
    assert [refused(keyring, key) for key in "ab"] == [401, 200]
    replace(path, "[broken")
    for _ in range(3):
        keyring.look()
        assert refused(keyring, "b") == 200, "the last good one holds"
    path.unlink()
    for _ in range(3):
        keyring.look()
        assert refused(keyring, "b") == 200
    errors = [each.getMessage() for each in caplog.records if each.levelname == "ERROR"]
    assert len(errors) == 2, "once for each change"
    assert "not valid TOML" in errors[0]
    assert "No such file" in errors[1]
    path.write_text(table("carol", "c"))
    keyring.look()
    assert [refused(keyring, key) for key in "bc"] == [401, 200]


def test_a_file_that_becomes_readable_is_read(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(table("alice", "a"))
    keyring = Keyring((), path)
    before = path.stat()
    path.write_text(table("alice", "b"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    keyring.look()
    assert refused(keyring, "b") == 200, "its size and its time are the same"


def test_a_broken_file_lets_nobody_in(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_bytes(b"\xff")
    keyring = Keyring((), path)
    assert refused(keyring, "") == 401
    replace(path, table("alice", "a"))
    keyring.look()
    assert refused(keyring, "a") == 200


def test_an_expired_key(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    text = table("old", "o", "expires = 2020-01-01T00:00:00Z")
    path.write_text(text + table("new", "n", "expires = 9999-01-01T00:00:00+01:00"))
    keyring = Keyring((), path)
    assert [refused(keyring, key) for key in "on"] == [401, 200]
    with pytest.raises(Refusal, match="expired"):
        keyring.authorize(bearer("o"), None)


def test_limits_outlive_a_change_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(table("alice", "a", "requests-per-minute = 1"))
    keyring = Keyring((), path)
    keyring.authorize(bearer("a"), "compute").enter()
    replace(path, table("alice", "a", "requests-per-minute = 1\nconcurrency = 9"))
    keyring.look()
    with pytest.raises(Refusal, match="'alice' has reached its limit requests-per-minute = 1"):
        keyring.authorize(bearer("a"), "compute").enter()


def test_limits_outlive_the_absence_of_a_key(tmp_path: Path) -> None:
    """A file that is written in place is empty for a moment, and that is a file without keys."""
    path, text = tmp_path / "keys.toml", table("alice", "a", "concurrency = 1")
    path.write_text(text)
    keyring = Keyring((), path)
    open_request = keyring.authorize(bearer("a"), "compute")
    open_request.enter()
    for changed in ("", table("alice", "a")):  # the key is away, and then has no limits
        replace(path, changed)
        keyring.look()
        replace(path, text)
        keyring.look()
        with pytest.raises(Refusal, match="concurrency = 1"):
            keyring.authorize(bearer("a"), "compute").enter()
    open_request.leave()
    keyring.authorize(bearer("a"), "compute").enter()


# -- the service


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text(
        table("alice", "a")
        + table("watcher", "w", "", '["metrics"]')
        + table("limited", "l", "requests-per-minute = 2")
        + table("openais", "o", "requests-per-minute = 1")
        + table("counted", "c", "tokens-per-minute = 10")
    )
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def service(keys: Path) -> Iterator[Serving]:
    with Serving("served_models:Obedient", "--api-key-file", str(keys)) as service:
        yield service


def error(response: httpx.Response, status: int) -> Any:
    assert response.status_code == status, response.text
    return response.json()["error"]


def test_scopes_of_paths(service: Serving, wording: Callable[..., None]) -> None:
    assert service.predict(1, x_api_key="a").json() == 1
    told = error(service.predict(1, x_api_key="w"), 403)
    assert (told["code"], told["type"]) == ("insufficient_scope", "permission_error")
    wording(told["message"], error(service.predict(1), 401)["message"])
    for path in ("/stats", "/metrics"):
        assert service.client.get(path, headers={"x-api-key": "w"}).status_code == 200
        error(service.client.get(path, headers={"x-api-key": "a"}), 403)
    for key in "aw":
        assert service.client.get("/v1/models", headers={"x-api-key": key}).status_code == 200
    error(service.client.get("/v1/models"), 401)
    assert service.client.get("/info").json()["api_key_required"] is True


def test_a_limit_that_is_reached(service: Serving) -> None:
    answers = [service.predict(1, x_api_key="l") for _ in range(3)]
    assert [each.status_code for each in answers] == [200, 200, 429]
    told = answers[2].json()["error"]
    assert (told["code"], told["type"]) == ("rate_limit_exceeded", "rate_limit_error")
    assert 1 <= int(answers[2].headers["retry-after"]) <= 30
    assert service.predict(1, x_api_key="a").status_code == 200, "others go on"


def test_openais_client_reads_the_refusals(service: Serving) -> None:
    def ask(key: str) -> None:
        with openai.OpenAI(base_url=f"{service.url}/v1", api_key=key, max_retries=0) as client:
            client.completions.create(model="-", prompt="a")

    with pytest.raises(openai.PermissionDeniedError) as forbidden:
        ask("w")
    assert forbidden.value.code == "insufficient_scope"
    with pytest.raises(openai.NotFoundError):  # the key is let in, and the model is another one
        ask("o")
    with pytest.raises(openai.RateLimitError) as limited:
        ask("o")
    assert limited.value.code == "rate_limit_exceeded"


def test_tokens_of_a_key(service: Serving) -> None:
    text = "x" * 400
    assert service.predict(text, x_api_key="c").status_code == 200
    answer = service.predict("x", x_api_key="c")
    assert "tokens-per-minute = 10" in error(answer, 429)["message"]
    assert int(answer.headers["retry-after"]) > 60


def test_the_document_tells_of_keys(service: Serving) -> None:
    document = service.client.get("/openapi.json").json()
    answers = document["paths"]["/predict"]["post"]["responses"]
    assert {"401", "403", "413", "415", "429", "501"} <= {*answers}
    assert "Retry-After" in answers["429"]["headers"]
    assert {"401", "403"} <= {*document["paths"]["/stats"]["get"]["responses"]}


def test_a_revoked_key_is_refused_by_all_web_processes(tmp_path: Path) -> None:
    """Also if the file is broken before a request comes to them."""
    path = tmp_path / "keys.toml"
    path.write_text(table("alice", "a"))
    path.chmod(0o600)
    arguments = ("served_models:kinds", "--api-key-file", str(path), "--web-workers", "2")
    with Serving(*arguments) as service:
        service.await_web_processes(2)
        replace(path, table("bob", "b"))
        path.chmod(0o600)
        until(lambda: service.log().count("has changed") >= 2)
        replace(path, "[broken")
        until(lambda: service.log().count("the keys read last stay valid") >= 2)
        with ExitStack() as stack:
            clients = [stack.enter_context(httpx.Client(base_url=service.url)) for _ in range(8)]
            answers = [
                each.post("/predict", json={"inputs": 1}, headers={"x-api-key": "a"})
                for each in clients
            ]
        assert {each.status_code for each in answers} == {401}


def test_a_web_process_that_is_killed_holds_no_place(tmp_path: Path) -> None:
    path, gate = tmp_path / "keys.toml", Gate(tmp_path / "gate")
    path.write_text(table("alice", "a", "concurrency = 1"))
    path.chmod(0o600)
    arguments = ("served_models:Obedient", "--api-key-file", str(path), "--web-workers", "2")
    with (
        Serving(*arguments, TEST_GATE=str(gate.__getstate__())) as service,
        ThreadPoolExecutor(1) as threads,
    ):
        runs = r"web process \d+ runs \(pid (\d+)\)"
        until(lambda: len(re.findall(runs, service.log())) == 2)
        other, killed = map(int, re.findall(runs, service.log()))
        service.await_web_processes(2)
        os.kill(other, signal.SIGSTOP)  # so the other one has the request
        first = threads.submit(service.predict, 1, x_api_key="a")
        gate.await_arrival()
        os.kill(killed, signal.SIGKILL)
        os.kill(other, signal.SIGCONT)
        with pytest.raises(httpx.HTTPError):
            first.result()
        gate.let_through(10)
        until(lambda: f"(pid {killed}) died" in service.log())
        # Its successor, which may not come, has not begun yet.
        assert service.predict(2, x_api_key="a").json() == 2
    gate.close()


def test_the_file_changes_while_the_service_runs(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(table("alice", "a", "requests-per-minute = 2"))
    path.chmod(0o644)
    with Serving(KINDS, "--api-key-file", str(path), "--web-workers", "2") as service:
        assert "every user of this machine can read" in service.log()
        until(lambda: service.predict(1, x_api_key="a").status_code == 200)
        answers = [service.predict(1, x_api_key="a").status_code for _ in range(12)]
        assert answers.count(200) <= 1, "both processes count together"
        assert 429 in answers
        replace(path, "[nonsense")
        until(lambda: service.predict(1, x_api_key="a") and "not valid TOML" in service.log())
        assert service.predict(1, x_api_key="a").status_code in (200, 429), "not 401"
        replace(path, table("bob", "b"))
        # Each process looks at the file in its own time, and ten answers may all be of one.
        until(lambda: all(service.predict(1, x_api_key="a").status_code == 401 for _ in range(10)))
        until(lambda: all(service.predict(1, x_api_key="b").json() == "int 1" for _ in range(10)))


@pytest.mark.parametrize(
    ("text", "problem"),
    [("[a]\nhash = 1", "[a] needs hash"), (None, "there is no file"), ("[", "not valid TOML")],
)
def test_a_broken_file_stops_the_start(tmp_path: Path, text: str | None, problem: str) -> None:
    path = tmp_path / "keys.toml"
    if text is not None:
        path.write_text(text)
    done = run("serve", KINDS, "--port", "0", "--api-key-file", str(path))
    assert done.returncode == 2
    assert problem in done.stderr
    assert "Traceback" not in done.stderr


def test_the_command_makes_a_key(tmp_path: Path) -> None:
    done = run("key", "new", "alice", "--scope", "metrics", "--scope", "admin")
    assert done.returncode == 0, done.stderr
    key = done.stderr.split()[0]
    path = tmp_path / "keys.toml"
    path.write_text(done.stdout)
    holder = Keyring((), path).authorize(bearer(key), "admin")
    assert (holder.key.name, holder.key.scopes) == ("alice", frozenset(("metrics", "admin")))
    assert key not in done.stdout
    for wrong in (("new", "a b"), ("new", "a", "--scope", "root"), ("new",)):
        assert run("key", *wrong).returncode == 2
