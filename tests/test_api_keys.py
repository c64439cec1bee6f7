"""API keys from a file: what it says, scopes, limits, and that it is read again."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from command_line import error_of, invoke
from http_in_process import Keyring
from serve_process import ROOT, Serving, error, key_table, until
from service_streamer.testing import Gate
from web_application import WebApplication

pytestmark = pytest.mark.no_gevent

KINDS = "served_models:kinds"
SCOPES = ("compute", "metrics", "admin")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.toml"


def replace(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    new.chmod(0o600)
    new.rename(path)


def bearer(key: str) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", b"Bearer " + key.encode())]


def holder_of(keyring: Keyring, key: str, scope: str | None = None) -> Any:
    return keyring.authorize(bearer(key), scope)


# -- the file


def test_a_file_of_keys_says_what_each_may_do(path: Path) -> None:
    limits = "requests-per-minute = 60\nconcurrency = 2"
    text = key_table("alice", "a", f"{limits}\nexpires = 9999-01-01T00:00:00Z")
    path.write_text(text + f'[bob]\nhash = "sha256:{hashlib.sha256(b"b").hexdigest()}"\n')
    keyring = Keyring((), path)
    alice, bob = (holder_of(keyring, key).key for key in "ab")
    assert (alice.name, alice.requests_per_minute, alice.concurrency) == ("alice", 60, 2)
    assert alice.expires == 253370764800.0
    assert (bob.name, bob.scopes, bob.has_limits) == ("bob", {"compute"}, False)


def test_the_documentation_has_a_file_of_keys(path: Path) -> None:
    page = (ROOT / "docs" / "howto" / "security.md").read_text()
    [text] = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    key = hashlib.sha256(b"a").hexdigest()
    path.write_text(re.sub(r"sha256:\w+", f"sha256:{key}", text).replace("2027", "9999"))
    found = holder_of(Keyring((), path), "a").key
    assert (found.name, found.has_limits) == ("alice", True)
    assert found.expires is not None


HASH = f'hash = "sha256:{"0" * 64}"'


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (None, "file that exists"),
        ("[a", "TOML"),
        ("[a]", "hash"),
        ("[a]\nhash = 3", "hash"),
        (f"[a]\n{HASH.upper()}", "'HASH'"),
        (f'[a]\nhash = "sha256:{"0" * 63}"', "hash"),
        ("a = 3", "'a'"),
        (f'["a b"]\n{HASH}', "'a b'"),
        (f'["a\\n"]\n{HASH}', r"'a\n'"),
        (f"[{'a' * 65}]\n{HASH}", "64"),
        (f"[a]\n{HASH}\nscope = []", "scopes"),
        (f"[a]\n{HASH}\nscopes = []", "scopes"),
        (f'[a]\n{HASH}\nscopes = ["root"]', "'root'"),
        (f"[a]\n{HASH}\nscopes = [[1]]", "scopes"),
        (f"[a]\n{HASH}\nconcurrency = 0", "concurrency"),
        (f"[a]\n{HASH}\nrequests-per-minute = true", "requests-per-minute"),
        (f"[a]\n{HASH}\nrequests_per_minute = 1", "requests-per-minute"),
        (f'[a]\n{HASH}\nexpires = "2027-01-01"', "expires"),
        (f"[a]\n{HASH}\nexpires = 2027-01-01T00:00:00", "expires"),
        (f"[a]\n{HASH}\n[b]\n{HASH}", "[b]"),
        pytest.param("".join(f"[k{number}]\n" for number in range(2001)), "2000", id="too many"),
        pytest.param(f"[a]\nhash = {'[' * 100_000}", "nested", id="too deep"),
        pytest.param(f"[a]\n{HASH}\nconcurrency = {1 << 60}", "concurrency", id="too large"),
        (f"[a]\n{HASH}\ntokens-per-minute = 9", "tokens-per-minute"),
    ],
)
def test_serve_refuses_a_wrong_file_of_keys(path: Path, text: str | None, word: str) -> None:
    if text is not None:
        path.write_text(text)
    error = error_of("serve", KINDS, "--api-key-file", str(path))
    assert word in error
    assert "keys.toml" in error
    assert "\n" not in error


@pytest.mark.parametrize("name", ["alice", "team@example.com", "a.b"])
def test_the_command_makes_a_key_and_its_table(path: Path, name: str) -> None:
    made = [invoke("key", "new", name, "--scope", "metrics", "--scope", "admin") for _ in "12"]
    key, other = (done.stderr.split()[0] for done in made)
    assert len(key) > 40
    assert key != other
    assert key not in made[0].stdout
    path.write_text(made[0].stdout)
    holder = holder_of(Keyring((), path), key, "admin")
    assert (holder.key.name, holder.key.scopes) == (name, {"metrics", "admin"})


def test_the_command_makes_no_key_for_a_wrong_name_or_scope() -> None:
    for wrong, word in ((("a b",), "a b"), (("a", "--scope", "root"), "root"), ((), "NAME")):
        assert word in error_of("key", "new", *wrong)


# -- limits


def limited(path: Path, **limits: int) -> Any:
    """The holder of a key with these limits."""
    lines = [f"{name.replace('_', '-')} = {value}" for name, value in limits.items()]
    path.write_text(key_table("alice", "a", "\n".join(lines)))
    return holder_of(Keyring((), path), "a")


def test_requests_flow_in_again(path: Path) -> None:
    holder = limited(path, requests_per_minute=60)
    assert [holder.admit(100.0) for _ in range(60)] == [None] * 60, "those of a minute at once"
    assert holder.admit(100.0) == ("requests-per-minute = 60", 1)
    assert holder.admit(100.5) == ("requests-per-minute = 60", 1)
    assert holder.admit(101.0) is None
    assert holder.admit(101.0) is not None
    assert [holder.admit(1000.0) for _ in range(61)].count(None) == 60, "and no more than those"


@pytest.mark.parametrize("rate", [1, 7, 599, 100_003])
def test_no_request_is_lost_to_rounding(path: Path, rate: int) -> None:
    holder = limited(path, requests_per_minute=rate)
    for now in (12345.678, 99999.1):
        admitted = [holder.admit(now) for _ in range(rate + 1)]
        assert admitted.count(None) == rate


def test_open_requests_are_limited_and_a_refused_one_costs_nothing(path: Path) -> None:
    holder = limited(path, requests_per_minute=3, concurrency=2)
    assert [holder.admit(0.0) for _ in range(12)] == [None, None, *10 * [("concurrency = 2", 1)]]
    holder.leave()
    assert holder.admit(0.0) is None
    holder.leave()
    assert holder.admit(0.0) == ("requests-per-minute = 3", 20)


def test_each_key_is_counted_apart_however_many_there_have_been(path: Path) -> None:
    """There is room for 4096 keys that web processes count together."""
    path.write_text("")
    keyring = Keyring((), path)
    for file, count in enumerate((2000, 2000, 150)):
        keys = [f"{file}-{number}" for number in range(count)]
        replace(path, "".join(key_table(f"k{key}", key, "concurrency = 1") for key in keys))
        keyring.look()
        holders = [holder_of(keyring, key) for key in keys]
        assert {holder.admit(0.0) for holder in holders} == {None}
        assert {holder.admit(0.0) for holder in holders} == {("concurrency = 1", 1)}


# -- the keyring


def refused(keyring: Keyring, key: str, scope: str | None = "compute") -> int:
    """The status; 200 if the key is let in."""
    try:
        keyring.authorize(bearer(key), scope)
    except Exception as refusal:
        return int(getattr(refusal, "status", 0))
    return 200


def test_scopes_are_kept_apart_and_keys_of_the_command_line_have_all_but_admin(path: Path) -> None:
    path.write_text("".join(key_table(each, each, "", [each]) for each in SCOPES))
    keyring = Keyring(("given", "other"), path)
    may = {each: {each} for each in SCOPES} | {"given": {"compute", "metrics"}}
    for key, scopes in may.items():
        assert refused(keyring, key, None) == 200
        for scope in SCOPES:
            assert refused(keyring, key, scope) == (200 if scope in scopes else 403)
    tenants = [holder_of(keyring, key).tenant for key in ("compute", "given", "other")]
    assert tenants == ["compute", "key 1", "key 2"]
    assert holder_of(Keyring(("one",)), "one").tenant == ""


@pytest.fixture(scope="module")
def locked() -> Iterator[WebApplication]:
    """An application that needs the key "right"."""
    with WebApplication(keyring=Keyring(("right",))) as application:
        yield application


@pytest.mark.parametrize(
    ("headers", "is_in"),
    [
        ([("x-api-key", b"right")], True),
        ([("authorization", b"bEaReR  right ")], True),
        ([("authorization", b"Basic right")], False),
        ([("x-api-key", b"right"), ("authorization", b"Bearer wrong")], True),
        ([("x-api-key", b"wrong"), ("authorization", b"Bearer right")], False),
        ([("x-api-key", b"")], False),
        ([("x-api-key", hashlib.sha256(b"right").digest())], False),
        ([("x-api-key", hashlib.sha256(b"right").hexdigest().encode())], False),
        ([("x-api-key", b"\xff")], False),
        ([], False),
    ],
)
def test_a_key_is_read_from_a_header(
    locked: WebApplication, headers: list[tuple[str, bytes]], is_in: bool
) -> None:
    sent: Any = [*headers, ("content-type", b"application/json")]
    asking = locked.client.post("/predict", content=b'{"inputs": 1}', headers=sent)
    response = locked.run(asking)
    assert response.status_code == (200 if is_in else 401)
    assert is_in or response.json()["error"]["code"] == "invalid_api_key"


def test_only_some_paths_need_no_key(locked: WebApplication) -> None:
    pages = ("/", "/docs", "/health/live", "/health/ready", "/info", "/openapi.json")
    for path in (*pages, "/v2", "/v2/health/live", "/v2/health/ready"):
        assert locked.get(path).status_code == 200, path
    for path in ("/stats", "/metrics", "/events", "/v1/models", "/v1/models/nobody"):
        refusal = locked.get(path)
        assert error(refusal, 401)["type"] == "authentication_error"
        assert refusal.headers["www-authenticate"] == "Bearer"
    infer = {"inputs": [{"name": "x", "shape": [1], "datatype": "INT8", "data": [2]}]}
    asked = locked.post("/v2/models/m/infer", infer)
    for answer in (asked, locked.get("/v2/models/m"), locked.get("/v2/models/other")):
        assert (answer.status_code, [*answer.json()]) == (401, ["error"])
    assert locked.post("/v2/models/m/infer", infer, x_api_key="right").status_code == 200
    assert locked.get("/stats/").status_code == 404  # and no redirect to elsewhere
    metrics = locked.get("/metrics", x_api_key="right").text
    assert 'path="/v1/models/{model}",status="401"' in metrics
    assert "nobody" not in metrics


def test_a_keyring_reads_a_changed_file(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.write_text(key_table("alice", "a"))
    keyring = Keyring((), path)
    assert refused(keyring, "a") == 200
    replace(path, key_table("bob", "b"))
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
    assert "TOML" in errors[0]
    assert "No such file" in errors[1]
    path.write_text(key_table("carol", "c"))
    keyring.look()
    assert [refused(keyring, key) for key in "bc"] == [401, 200]


def test_a_file_that_changes_in_place_is_read_again_also_at_the_same_time(path: Path) -> None:
    path.write_text(key_table("alice", "a"))
    keyring = Keyring((), path)
    before = path.stat()
    path.write_text(key_table("alice", "b"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    keyring.look()
    assert refused(keyring, "b") == 200, "its size and its time are the same"


def test_a_broken_file_lets_nobody_in(path: Path) -> None:
    path.write_bytes(b"\xff")
    keyring = Keyring((), path)
    assert refused(keyring, "") == 401
    replace(path, key_table("alice", "a"))
    keyring.look()
    assert refused(keyring, "a") == 200


def test_what_a_key_has_used_outlives_changes_of_the_file(path: Path) -> None:
    """A file that is written in place is empty for a moment, and that is a file without keys."""
    text = key_table("alice", "a", "requests-per-minute = 2\nconcurrency = 1")
    path.write_text(text)
    keyring = Keyring((), path)
    open_request = holder_of(keyring, "a")
    assert open_request.admit(0.0) is None
    for changed in ("", key_table("alice", "a")):  # the key is away, and then has no limits
        for each in (changed, text):
            replace(path, each)
            keyring.look()
        assert holder_of(keyring, "a").admit(0.0) == ("concurrency = 1", 1)
    replace(path, key_table("alice", "a", "requests-per-minute = 2\nconcurrency = 2"))
    keyring.look()
    assert holder_of(keyring, "a").admit(0.0) is None
    assert holder_of(keyring, "a").admit(0.0) == ("concurrency = 2", 1)
    open_request.leave()
    assert holder_of(keyring, "a").admit(0.0) == ("requests-per-minute = 2", 30)


# -- the service


@pytest.fixture
def service(path: Path) -> Iterator[WebApplication]:
    """An application with a file of keys."""
    path.write_text(
        key_table("alice", "a")
        + key_table("watcher", "w", "", ["metrics"])
        + key_table("limited", "l", "requests-per-minute = 2")
    )
    with WebApplication(keyring=Keyring((), path), api_key_file=path) as application:
        yield application


def predict(service: WebApplication, key: str) -> httpx.Response:
    return service.post("/predict", {"inputs": 1}, x_api_key=key)


def test_each_path_requires_its_scope(service: WebApplication) -> None:
    assert predict(service, "a").json() == 1
    told = error(predict(service, "w"), 403)
    assert (told["code"], told["type"]) == ("insufficient_scope", "permission_error")
    assert "compute" in told["message"]
    for path in ("/stats", "/metrics"):
        assert service.get(path, x_api_key="w").status_code == 200
        error(service.get(path, x_api_key="a"), 403)
    for key in "aw":
        assert service.get("/v1/models", x_api_key=key).status_code == 200
    error(service.get("/v1/models"), 401)
    assert service.get("/info").json()["api_key_required"] is True


def test_a_request_beyond_the_limit_of_its_key_is_refused(service: WebApplication) -> None:
    answers = [predict(service, "l") for _ in range(3)]
    assert [each.status_code for each in answers] == [200, 200, 429]
    told = answers[2].json()["error"]
    assert (told["code"], told["type"]) == ("rate_limit_exceeded", "rate_limit_error")
    assert 1 <= int(answers[2].headers["retry-after"]) <= 30
    assert predict(service, "a").status_code == 200, "others go on"


def test_the_document_tells_of_keys(service: WebApplication) -> None:
    document = service.get("/openapi.json").json()
    answers = document["paths"]["/predict"]["post"]["responses"]
    assert {"401", "403", "413", "415", "429", "501"} <= {*answers}
    assert "Retry-After" in answers["429"]["headers"]
    assert {"401", "403"} <= {*document["paths"]["/stats"]["get"]["responses"]}


@pytest.mark.long
def test_all_web_processes_follow_the_file_of_keys(tmp_path: Path) -> None:
    """Also if the file is broken before a request comes to them."""
    path = tmp_path / "keys.toml"
    path.write_text(key_table("alice", "a", "requests-per-minute = 2"))
    path.chmod(0o644)
    arguments = (KINDS, "--api-key-file", str(path), "--web-workers", "2")
    with Serving(*arguments) as service:
        assert "every user of this machine can read" in service.log()
        service.await_web_processes(2)
        answers = [service.predict(1, x_api_key="a").status_code for _ in range(12)]
        assert answers.count(200) <= 3, "both processes count together"
        assert 429 in answers
        replace(path, key_table("bob", "b"))
        until(lambda: service.log().count("has changed") >= 2)
        replace(path, "[broken")
        until(lambda: service.log().count("the keys read last stay valid") >= 2)
        with ExitStack() as stack:
            clients = [stack.enter_context(httpx.Client(base_url=service.url)) for _ in range(8)]
            for key, status in (("a", 401), ("b", 200)):
                answers = [
                    each.post("/predict", json={"inputs": 1}, headers={"x-api-key": key})
                    for each in clients
                ]
                assert {each.status_code for each in answers} == {status}


#: Starts a service that has a bug: a file of keys with the word "bug" cannot be read.
BUG = """
import sys
from service_streamer.serve.http import keyring
from service_streamer.serve.cli.main import main

def read_keys(text, read=keyring.read_keys):
    if "bug" in text:
        print("a look at the file", file=sys.stderr, flush=True)
        raise RuntimeError("a bug of ours")
    return read(text)

keyring.read_keys = read_keys
main()
"""


def test_a_revoked_key_is_refused_after_a_reload_that_failed_for_a_bug(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    replace(path, key_table("alice", "a"))
    arguments = (KINDS, "--port", "0", "--api-key-file", str(path))
    with Serving(*arguments, program=(sys.executable, "-c", BUG, "serve")) as service:
        assert service.predict(1, x_api_key="a").status_code == 200
        replace(path, "# bug")
        until(lambda: service.log().count("a look at the file") >= 3)
        assert service.predict(1, x_api_key="a").status_code == 200, "the keys read last stay valid"
        path.write_text(key_table("bob", "b"))
        until(lambda: service.predict(1, x_api_key="a").status_code == 401)
        assert service.predict(1, x_api_key="b").status_code == 200
        assert service.log().count("Traceback") == 1, "it is logged once"


def test_a_web_process_that_is_killed_holds_no_place(tmp_path: Path) -> None:
    path, gate = tmp_path / "keys.toml", Gate(tmp_path / "gate")
    path.write_text(key_table("alice", "a", "concurrency = 1"))
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
