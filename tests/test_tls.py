"""TLS: certificates, those of clients, their renewal, and clients that do something else."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from serve_process import Serving, run, until
from service_streamer.serve.http.asgi import ASGIBridge
from service_streamer.serve.http.tls import PASSWORD, TLS
from stub_exchange import StubClient

pytestmark = pytest.mark.no_gevent

KINDS = "served_models:kinds"


class Files:
    """The certificates of a service, and of a client.

    Attributes:
        ca: the authority.
        cert, key: files of the service.
        authority: the file of the authority.
        client: the file of a client's certificate with its key.
    """

    def __init__(self, folder: Path) -> None:
        self.ca = trustme.CA()
        self.cert, self.key = folder / "cert.pem", folder / "key.pem"
        self.authority, self.client = folder / "ca.pem", folder / "client.pem"
        self.ca.cert_pem.write_to_path(self.authority)
        self.ca.issue_cert("client@example.com").private_key_and_cert_chain_pem.write_to_path(
            self.client
        )
        self.issue("first.test")

    def issue(self, name: str) -> None:
        """Renew the service's certificate: in new files that take the place of the old ones."""
        issued = self.ca.issue_cert("127.0.0.1", name)
        for path, blob in ((self.key, issued.private_key_pem), (self.cert, self.chain(issued))):
            new = path.with_suffix(".new")
            new.write_bytes(blob if isinstance(blob, bytes) else blob.bytes())
            new.rename(path)

    @staticmethod
    def chain(issued: trustme.LeafCert) -> bytes:
        return b"".join(each.bytes() for each in issued.cert_chain_pems)

    @property
    def arguments(self) -> tuple[str, ...]:
        return "--ssl-certfile", str(self.cert), "--ssl-keyfile", str(self.key)

    def context(self, *, with_certificate: bool = False) -> ssl.SSLContext:
        """A client's."""
        context = ssl.create_default_context(cafile=self.authority)
        if with_certificate:
            context.load_cert_chain(self.client)
        return context


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def service(files: Files) -> Iterator[Serving]:
    with Serving(KINDS, *files.arguments) as service:
        yield service


def address(service: Serving) -> tuple[str, int]:
    url = httpx.URL(service.url)
    assert url.port is not None
    return url.host, url.port


def names(service: Serving, files: Files) -> set[str]:
    """Those of the certificate that a new connection gets."""
    with (
        socket.create_connection(address(service)) as sock,
        files.context().wrap_socket(sock, server_hostname="127.0.0.1") as secure,
    ):
        found = secure.getpeercert()
        assert found is not None
        return {value for kind, value in found["subjectAltName"] if kind == "DNS"}  # type: ignore[misc]


def test_a_service_over_tls(service: Serving, files: Files) -> None:
    assert service.url.startswith("https://")
    with httpx.Client(base_url=service.url, verify=files.context()) as client:
        for _ in range(2):
            assert client.post("/predict", json={"inputs": 1}).json() == "int 1"
        assert client.get("/health/ready").status_code == 200
        large = "x" * (1 << 20)
        assert client.post("/predict", json={"inputs": large}).status_code == 200
        assert client.get("/").status_code == 200
    with (
        httpx.Client(base_url=service.url, verify=ssl.create_default_context()) as stranger,
        pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"),
    ):
        stranger.get("/")


class SecureClient(StubClient):
    """A client behind TLS."""

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return object() if name == "sslcontext" else default


@pytest.mark.parametrize(("kind", "scheme"), [(StubClient, "http"), (SecureClient, "https")])
def test_the_application_knows_the_scheme(kind: type[StubClient], scheme: str) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": scope["scheme"].encode()})

    async def talk() -> bytes:
        client = kind(ASGIBridge(app))
        client.send(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
        for _ in range(10):
            await asyncio.sleep(0)
        client.leave()
        return client.received

    assert asyncio.run(talk()).endswith(b"\r\n\r\n" + scheme.encode())


def test_a_client_that_does_not_read(files: Files) -> None:
    body = b'{"inputs": "%b"}' % (b"x" * (12 << 20))
    head = b"POST /predict HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(body)
    with Serving(KINDS, *files.arguments, "--write-timeout", "1") as service:
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
            sock.connect(address(service))
            with files.context().wrap_socket(sock, server_hostname="127.0.0.1") as secure:
                secure.sendall(head + body)
                until(lambda: "of an answer unread" in service.log())
        assert names(service, files), "others are served"


def test_old_protocols_are_refused(service: Serving, files: Files) -> None:
    context = files.context()
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    context.set_ciphers("ALL:@SECLEVEL=0")
    with socket.create_connection(address(service)) as sock, pytest.raises(ssl.SSLError):
        context.wrap_socket(sock, server_hostname="127.0.0.1")


@pytest.mark.parametrize(
    "sent", [b"GET / HTTP/1.1\r\nhost: a\r\n\r\n", b"\x16\x03\x01\x00\x00", b"\0" * 100, b""]
)
def test_what_is_no_tls_is_dropped_quietly(service: Serving, files: Files, sent: bytes) -> None:
    before = service.log()
    with socket.create_connection(address(service)) as sock:
        sock.sendall(sent)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(1024):
            pass
    assert names(service, files), "others are served"
    assert service.log() == before


def test_a_slow_handshake_holds_up_nobody(service: Serving, files: Files) -> None:
    with socket.create_connection(address(service)), socket.create_connection(address(service)):
        assert names(service, files)


def test_a_stop_does_not_wait_for_a_handshake(files: Files) -> None:
    with Serving(KINDS, *files.arguments) as service:
        with socket.create_connection(address(service)) as sock:
            assert names(service, files)  # so the other one is accepted, too
            assert service.terminate() == 0
            assert not sock.recv(1)
        assert "Traceback" not in service.log()
        assert "never retrieved" not in service.log()


@pytest.mark.parametrize("processes", [1, 2])
def test_a_renewed_certificate(tmp_path: Path, processes: int) -> None:
    files = Files(tmp_path)
    with Serving(KINDS, *files.arguments, "--web-workers", str(processes)) as service:
        until(lambda: service.predict(1).status_code == 200)
        if processes > 1:
            service.await_web_processes(processes)
        with httpx.Client(base_url=service.url, verify=files.context()) as client:
            assert client.get("/health/live").status_code == 200
            assert names(service, files) == {"first.test"}
            files.issue("second.test")
            until(lambda: service.log().count("was read again") >= processes)
            assert client.get("/health/live").status_code == 200
            stream = client._transport._pool  # type: ignore[attr-defined]
            assert len(stream.connections) == 1, "its connection is the first one"
        files.cert.write_text("nonsense")
        until(lambda: service.log().count("cannot be used") >= processes)
        assert names(service, files) == {"second.test"}
        assert "Traceback" not in service.log()


def test_certificates_of_clients(files: Files, tmp_path: Path) -> None:
    others = Files(tmp_path)
    arguments = (*files.arguments, "--ssl-ca-certs", str(files.authority))
    with Serving(KINDS, *arguments, "--access-log") as service:
        known = files.context(with_certificate=True)
        with httpx.Client(base_url=service.url, verify=known) as client:
            assert client.post("/predict", json={"inputs": 1}).json() == "int 1"
        strangers = (files.context(), files.context())
        strangers[1].load_cert_chain(others.client)
        for context in strangers:
            with (
                httpx.Client(base_url=service.url, verify=context) as client,
                pytest.raises((httpx.ReadError, httpx.RemoteProtocolError, httpx.ConnectError)),
            ):
                client.post("/predict", json={"inputs": 2})
        assert service.log().count("POST /predict") == 1
        assert "Traceback" not in service.log()


# -- files that are wrong


def refused(*arguments: str, **env: str) -> str:
    """The last line of a service that does not start."""
    done = run("serve", KINDS, "--port", "0", *arguments, **env)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()[-1]


def test_files_that_cannot_be_used(files: Files, tmp_path: Path) -> None:
    other = Files(tmp_path)
    text = tmp_path / "text.pem"
    text.write_text("nonsense")
    cert, key = str(files.cert), str(files.key)
    assert "in PEM form" in refused("--ssl-certfile", str(text), "--ssl-keyfile", key)
    assert "in PEM form" in refused("--ssl-certfile", cert, "--ssl-keyfile", str(text))
    assert "in PEM form" in refused("--ssl-certfile", cert)
    assert "does not belong" in refused("--ssl-certfile", cert, "--ssl-keyfile", str(other.key))
    assert "there is no file" in refused("--ssl-certfile", str(tmp_path / "none.pem"))
    both = ("--ssl-certfile", cert, "--ssl-keyfile", key)
    assert "--ssl-ca-certs" in refused(*both, "--ssl-ca-certs", str(text))
    assert "without --ssl-certfile" in refused("--ssl-keyfile", key)
    assert "without --ssl-certfile" in refused("--ssl-ca-certs", cert)


def test_a_key_with_a_password(files: Files, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_pem_private_key(files.key.read_bytes(), None)
    path = tmp_path / "encrypted.pem"
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"open sesame"),
        )
    )
    arguments = ("--ssl-certfile", str(files.cert), "--ssl-keyfile", str(path))
    assert "is encrypted" in refused(*arguments)
    assert "may be wrong" in refused(*arguments, **{PASSWORD: "wrong"})
    with Serving(KINDS, *arguments, **{PASSWORD: "open sesame"}) as service:
        assert names(service, files) == {"first.test"}
        assert "not an option" not in service.log()


def test_files_that_become_unusable_change_nothing(tmp_path: Path) -> None:
    files = Files(tmp_path)
    tls = TLS(files.cert, files.key)
    first = tls.context
    tls.look()
    assert tls.context is first
    files.issue("second.test")
    tls.look()
    second = tls.context
    assert second is not first
    os.unlink(files.cert)
    tls.look()
    assert tls.context is second
