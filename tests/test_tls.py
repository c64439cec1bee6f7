"""TLS: certificates, those of clients, their renewal, and clients that do something else."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from command_line import error_of
from http_in_process import ASGIBridge, asking, in_still_time, post
from serve_process import Serving, until

pytestmark = [pytest.mark.no_gevent, pytest.mark.xdist_group("tls")]

KINDS = "served_models:kinds"
PASSWORD = "SERVICE_STREAMER_SSL_KEYFILE_PASSWORD"


class Files:
    """The certificates of an authority, of a service, and of a client with its key."""

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


def names(service: Serving, files: Files) -> set[str]:
    """Those of the certificate that a new connection gets."""
    with (
        service.connect() as sock,
        files.context().wrap_socket(sock, server_hostname="127.0.0.1") as secure,
    ):
        found = secure.getpeercert()
        assert found is not None
        return {value for kind, value in found["subjectAltName"] if kind == "DNS"}  # type: ignore[misc]


def test_service_answers_over_tls(service: Serving, files: Files) -> None:
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


@pytest.mark.parametrize(("is_secure", "scheme"), [(False, b"http"), (True, b"https")])
@in_still_time
async def test_application_knows_the_scheme(is_secure: bool, scheme: bytes) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": scope["scheme"].encode()})

    request = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"
    client = await asking(ASGIBridge(app), request, is_secure=is_secure)
    assert client.received.endswith(b"\r\n\r\n" + scheme)


@pytest.mark.long
def test_client_is_cut_when_it_does_not_read_over_tls(service: Serving, files: Files) -> None:
    body = b'{"inputs": "%b"}' % (b"x" * (12 << 20))
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        sock.connect(service.address)
        with files.context().wrap_socket(sock, server_hostname="127.0.0.1") as secure:
            secure.sendall(post(body, path=b"/predict"))
            until(lambda: "of an answer unread" in service.log())
    assert names(service, files), "others are served"


def test_old_protocols_are_refused(service: Serving, files: Files) -> None:
    context = files.context()
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    context.set_ciphers("ALL:@SECLEVEL=0")
    with service.connect() as sock, pytest.raises(ssl.SSLError):
        context.wrap_socket(sock, server_hostname="127.0.0.1")


@pytest.mark.parametrize(
    "sent", [b"GET / HTTP/1.1\r\nhost: a\r\n\r\n", b"\x16\x03\x01\x00\x00", b"\0" * 100, b""]
)
def test_connection_without_tls_is_dropped(service: Serving, files: Files, sent: bytes) -> None:
    before = service.log()
    with service.connect() as sock:
        assert names(service, files), "it does not hold up others"
        sock.sendall(sent)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(1024):
            pass
    assert names(service, files), "others are served"
    assert service.log() == before


def status_of_health(connection: http.client.HTTPSConnection) -> int:
    connection.request("GET", "/health/live")
    response = connection.getresponse()
    response.read()
    return response.status


@pytest.mark.long
def test_certificate_is_replaced_when_its_file_is_renewed_and_usable(tmp_path: Path) -> None:
    files = Files(tmp_path)
    with Serving(KINDS, *files.arguments, "--web-workers", "2") as service:
        until(lambda: service.predict(1).status_code == 200)
        service.await_web_processes(2)
        kept = http.client.HTTPSConnection(*service.address, context=files.context())
        with contextlib.closing(kept):
            assert status_of_health(kept) == 200
            assert names(service, files) == {"first.test"}
            connection = kept.sock
            files.issue("second.test")
            until(lambda: service.log().count("was read again") >= 2)
            assert status_of_health(kept) == 200
            assert kept.sock is connection, "it goes on with its certificate"
        for broken, says in (("nonsense", "cannot be used"), (None, "No such file")):
            if broken is None:
                files.cert.unlink()
            else:
                files.cert.write_text(broken)
            until(lambda says=says: service.log().count(says) >= 2)
            assert names(service, files) == {"second.test"}
        assert "Traceback" not in service.log()


def test_client_needs_a_certificate_of_the_authority(files: Files, tmp_path: Path) -> None:
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


def refused(*arguments: str, **variables: str) -> str:
    """Why a service does not start."""
    return error_of("serve", KINDS, "--port", "0", *arguments, **variables)


def test_service_does_not_start_with_unusable_files(files: Files, tmp_path: Path) -> None:
    other = Files(tmp_path)
    text = tmp_path / "text.pem"
    text.write_text("nonsense")
    cert, key = str(files.cert), str(files.key)
    assert "in PEM form" in refused("--ssl-certfile", str(text), "--ssl-keyfile", key)
    assert "in PEM form" in refused("--ssl-certfile", cert, "--ssl-keyfile", str(text))
    assert "in PEM form" in refused("--ssl-certfile", cert)
    assert "does not belong" in refused("--ssl-certfile", cert, "--ssl-keyfile", str(other.key))
    assert "none.pem" in refused("--ssl-certfile", str(tmp_path / "none.pem"))
    both = ("--ssl-certfile", cert, "--ssl-keyfile", key)
    assert "--ssl-ca-certs" in refused(*both, "--ssl-ca-certs", str(text))
    assert "without --ssl-certfile" in refused("--ssl-keyfile", key)
    assert "without --ssl-certfile" in refused("--ssl-ca-certs", cert)


def test_encrypted_key_needs_its_password_and_stop_does_not_wait_for_a_handshake(
    files: Files, tmp_path: Path
) -> None:
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
    assert "may be wrong" in refused(*arguments, SSL_KEYFILE_PASSWORD="wrong")
    with Serving(KINDS, *arguments, **{PASSWORD: "open sesame"}) as service:
        with service.connect() as sock:
            assert names(service, files) == {"first.test"}  # so the other one is accepted, too
            assert service.terminate() == 0
            assert not sock.recv(1)
        for text in ("not an option", "Traceback", "never retrieved"):
            assert text not in service.log()
