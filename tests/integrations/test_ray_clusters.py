"""Which cluster a RayStreamer goes to, with a Ray of which the test says what it does."""

from __future__ import annotations

import inspect
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

import models
from pools import fake_pool
from ray_stub import RayStub
from service_streamer import RayStreamer


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[RayStub]:
    """This process is connected to no cluster, and none was started on this machine."""
    stub = RayStub()
    stub.is_connected = False
    stub.replace_ray(monkeypatch)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    runs_here(monkeypatch)
    yield stub
    models.await_worker_threads()


def runs_here(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """The heads of these clusters run on this machine, and no others."""
    services = ray._private.services
    monkeypatch.setattr(services, "find_gcs_addresses", lambda: frozenset(addresses))


def connect(address: str | None) -> None:
    RayStreamer(models.echo, num_gpus=0, address=address).close()


@pytest.fixture
def head() -> Iterator[socket.socket]:
    """A port of this machine that is nobody else's. Nothing answers there, unless it listens."""
    with socket.socket() as head:
        head.bind(("127.0.0.1", 0))
        yield head


def address_of(head: socket.socket) -> str:
    return f"127.0.0.1:{head.getsockname()[1]}"


NAMES = {"localhost": "127.0.0.1", "head": "192.0.2.7"}


@pytest.mark.parametrize(
    ("address", "other", "is_same"),
    [
        ("127.0.0.1:5", "127.0.0.1:5", True), ("localhost:5", "127.0.0.1:5", True),
        ("127.0.0.1:5", "127.0.0.2:5", True),  # both are this machine's
        ("localhost:6", "127.0.0.1:5", False),
        ("head:5", "192.0.2.7:5", True), ("192.0.2.7:5", "head:5", True),
        ("head:5", "192.0.2.8:5", False), ("127.0.0.1:5", "head:5", False),
        ("nobody:5", "127.0.0.1:5", False), ("nobody:5", "nobody:5", True),
        ("head", "192.0.2.7:5", False), ("192.0.2.7:", "192.0.2.7:5", False),
    ],
)  # fmt: skip
def test_the_cluster_of_this_process_is_taken_by_any_of_its_addresses(
    stub: RayStub, monkeypatch: pytest.MonkeyPatch, address: str, other: str, is_same: bool
) -> None:
    def getaddrinfo(host: str, port: None, **_: Any) -> Any:
        ip = NAMES.get(host, host)
        if not ip[0].isdecimal():
            raise socket.gaierror
        return [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", (ip, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    # As a kernel with net.ipv4.ip_nonlocal_bind:
    monkeypatch.setattr(socket.socket, "bind", lambda *_: None)
    stub.is_connected, stub.address = True, other
    if is_same:
        connect(address)
    else:
        with pytest.raises(RuntimeError, match="connected to another Ray cluster than"):
            connect(address)
    assert stub.inits == []


def test_all_addresses_of_this_machine_are_one(stub: RayStub) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.200", 9))  # which sends nothing
        except OSError:
            pytest.skip("this machine has no network")
        own = probe.getsockname()[0]
    stub.is_connected = True
    connect(f"{own}:5")


def test_clients_want_one_pool_whether_they_are_connected_or_not(
    stub: RayStub, shared: Callable[..., Any]
) -> None:
    wanted = []
    with fake_pool() as pool:
        for is_connected, address in ((True, None), (True, "10.0.0.2:6379"), (False, None)):
            stub.is_connected = is_connected
            streamer = RayStreamer(models.echo, shared="a", address=address)
            with pool.accepted() as peer:
                streamer.close()
                assert peer.hello is not None
                wanted.append(peer.hello.fingerprint)
    assert wanted[0] == wanted[2] != wanted[1]


@pytest.mark.parametrize("address", [None, "auto"])
@pytest.mark.parametrize("is_there", [True, False])
def test_a_cluster_that_has_ended_is_not_connected_to(
    stub: RayStub, head: socket.socket, tmp_path: Path, address: str | None, is_there: bool
) -> None:
    """Ray would look for the last one that was started here, for more than a minute."""
    file = tmp_path / "ray" / "ray_current_cluster"
    file.write_text(f"{address_of(head)}\n")
    if is_there:
        head.listen()
        connect(address)
        assert stub.inits == [address]
        return
    with pytest.raises(ConnectionError, match=rf"ray stop or delete {file}"):
        connect(address)
    connect("local")
    assert stub.inits == ["local"]


def test_the_cluster_that_runs_here_is_taken_if_it_is_the_only_one(
    stub: RayStub, head: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ray" / "ray_current_cluster").write_text(address_of(head))
    runs_here(monkeypatch, "192.0.2.7:6379", "192.0.2.8:6379")  # of several, Ray takes the last
    with pytest.raises(ConnectionError, match="it was the last one"):
        connect("auto")
    runs_here(monkeypatch, "192.0.2.7:6379")
    connect("auto")
    assert stub.inits == ["auto"]


@pytest.mark.parametrize("place", [None, "auto", "given"])
def test_an_address_that_nothing_answers_at_is_refused_before_ray_tries_it(
    stub: RayStub, head: socket.socket, monkeypatch: pytest.MonkeyPatch, place: str | None
) -> None:
    for address, error, text in (
        (address_of(head), ConnectionError, "there is no Ray cluster at"),
        ("ray://127.0.0.1:10001", RuntimeError, "does not work over Ray Client"),
    ):
        if place != "given":
            monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(error, match=text):
            connect(address if place == "given" else place)
    assert stub.inits == []


def test_a_program_keeps_its_handler_of_sigterm(stub: RayStub) -> None:
    def own(*_: object) -> None:
        """The program's handler."""

    before = signal.signal(signal.SIGTERM, own)
    try:
        stub.when_connecting = lambda: signal.signal(signal.SIGTERM, lambda *_: None) and None
        connect(None)
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (RuntimeError("Version mismatch"), "UnusableCluster", "Version mismatch"),
        (ray.exceptions.AuthenticationError("wrong token"), "ConnectionError", "wrong token"),
    ],
)
def test_a_cluster_that_refuses_this_process_cannot_be_used(
    stub: RayStub, error: Exception, kind: str, text: str
) -> None:
    def refuse() -> None:
        raise error

    stub.when_connecting = refuse
    with pytest.raises((RuntimeError, ConnectionError), match=text) as refused:
        connect(None)
    assert type(refused.value).__name__ == kind


def test_ray_has_the_parts_that_the_package_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it fails after an upgrade, adapt leaving.py, addresses.py, losses.py or cluster.py."""
    from ray import exceptions
    from ray._common.utils import get_ray_address_file
    from ray._private import services, worker

    assert 'name="ray_listen_error_messages"' in inspect.getsource(worker.connect)
    file = tmp_path / "ray" / "ray_current_cluster"
    file.parent.mkdir()
    file.write_text("there:1\n")
    for name in ("RAY_TMPDIR", "TMPDIR"):
        with monkeypatch.context() as patch:
            patch.delenv("RAY_TMPDIR", raising=False)
            patch.setenv(name, str(tmp_path))
            assert get_ray_address_file(None) == str(file)
    assert isinstance(services.find_gcs_addresses(), frozenset)
    assert {
        "ObjectStoreFullError", "OutOfDiskError", "ActorUnschedulableError",
        "ActorPlacementGroupRemoved", "RuntimeEnvSetupError", "OutOfMemoryError", "NodeDiedError",
        "LocalRayletDiedError", "ActorUnavailableError", "ObjectLostError",
        "ObjectFetchTimedOutError", "ObjectReconstructionFailedError", "OwnerDiedError",
        "TaskCancelledError", "ActorDiedError", "RayActorError",
    } <= vars(exceptions).keys()  # fmt: skip
    died = inspect.signature(exceptions.RayActorError.__init__).parameters
    assert {"actor_init_failed", "preempted"} <= died.keys()
    assert issubclass(exceptions.AuthenticationError, exceptions.RayError)
    assert callable(ray.util.client.ray.is_connected)
    assert hasattr(ray.runtime_context.RuntimeContext, "gcs_address")
