"""The options of a web process, and the kinds of values that only they have."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...options import kinds
from ...options.kinds import Kind, Options, option

_HOST = re.compile(r"(\*\.)?[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?|[0-9a-f]*:[0-9a-f:.]*:[0-9a-f.]*")
_NAME = re.compile("[A-Za-z0-9][A-Za-z0-9_-]*")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9_.-]+|\[[0-9a-f:.]+\])(:\d{1,5})?")


@dataclass(frozen=True)
class Several(Kind):
    """A tuple of values of another kind; on the command line the option is repeated."""

    each: Kind = field(kw_only=True)

    @classmethod
    def of(cls, each: Kind) -> Several:
        return cls(each.form, each.words, each=each)

    def check(self, name: str, value: Any) -> Any:
        return tuple(self.each.check(name, part) for part in value)


def _bare(host: str) -> str:
    return host.lower().removeprefix("[").removesuffix("]")


#: A number of bytes, which is written as 16777216, 16M or 16MiB.
_SIZE = replace(
    kinds.count(),
    form="size",
    words="a number of bytes above 0, such as 16777216, 512k, 16M or 1G",
)

#: Kept as ASGI has it, in lower-case bytes. Empty for none.
_HEADER = Kind(
    "header", "the name of a header, such as X-Priority", (str, bytes),
    lambda value: isinstance(value, bytes) or _NAME.fullmatch(value) is not None,
    lambda value: value if isinstance(value, bytes) else value.lower().encode(),
)  # fmt: skip

#: Without a port; ``*.`` stands for all below.
_HOST_NAME = Kind(
    "host", "a host name without scheme and port, such as api.example.com", (str,),
    lambda value: _HOST.fullmatch(_bare(value)) is not None,
    _bare,
)  # fmt: skip

#: Of web pages, as browsers send it; ``*`` stands for all.
_WEB_ORIGIN = Kind(
    "origin", "* or an origin without a path, such as https://example.com", (str,),
    lambda value: value == "*" or _ORIGIN.fullmatch(value.lower()) is not None,
    str.lower,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class WebOptions(Options):
    """How the web tier answers."""

    timeout: float = option(
        30.0, kinds.seconds(), "Time limit of a request, in seconds; else 504, or 503 at once.",
    )  # fmt: skip
    api_keys: tuple[str, ...] = option(
        (), Several.of(kinds.text()),
        "Key that requests need for the model, metrics and statistics.",
        "May be given several times. Better in the environment than on the command line.",
        shown="no key is needed", is_private=True,
    )  # fmt: skip
    api_key_file: Path | None = option(
        None, kinds.file(exists=True).or_none("no file"),
        "TOML file of API keys with scopes, limits and ends.",
        "It is read again when it changes. 'service-streamer key new' makes a key.",
        shown="no file",
    )  # fmt: skip
    ssl_certfile: Path | None = option(
        None, kinds.file(exists=True).or_none("no TLS"),
        "PEM file with the certificate and its chain; the service then speaks TLS.",
        "It is read again when it changes.",
        shown="no TLS",
    )  # fmt: skip
    ssl_keyfile: Path | None = option(
        None, kinds.file(exists=True).or_none("the certificate's file"),
        "PEM file with the key of the certificate.",
        "Its password, if it has one, is read from SERVICE_STREAMER_SSL_KEYFILE_PASSWORD.",
        shown="in the file of --ssl-certfile",
    )  # fmt: skip
    ssl_ca_certs: Path | None = option(
        None, kinds.file(exists=True).or_none("no client certificates"),
        "PEM file of the authorities that clients' certificates must be from.",
        "Clients without one cannot connect.",
        shown="clients need no certificate",
    )  # fmt: skip
    cors_origins: tuple[str, ...] = option(
        (), Several.of(_WEB_ORIGIN),
        "Origin of web pages that may call the service from a browser, such as "
        "https://example.com; * for all.",
        "May be given several times.",
        shown="none",
    )  # fmt: skip
    access_log: bool = option(
        False, kinds.FLAG, "Log a line for each request, in the format of --log-format.",
    )  # fmt: skip
    priority_header: bytes = option(
        b"", _HEADER,
        "Header with the priority of a request, a whole number; the higher goes first.",
        "For a proxy in front to set.",
        shown="no header",
    )  # fmt: skip
    tenant_header: bytes = option(
        b"", _HEADER, "Header with the tenant of a request.",
        "Tenants share the model, so that none holds up the others. For a proxy in front to set. "
        "Without it each of several keys is a tenant.",
        shown="no header",
    )  # fmt: skip
    allowed_hosts: tuple[str, ...] = option(
        (), Several.of(_HOST_NAME),
        "Host that requests may name, such as api.example.com or *.example.com.",
        "May be given several times. Health checks may name any host.",
        shown="any host",
    )  # fmt: skip
    max_body: int = option(
        16 << 20, _SIZE, "Upper bound on the body of a request, in bytes; else 413.",
        shown="16M",
    )  # fmt: skip
    max_pixels: int = option(
        64_000_000, kinds.count(),
        "Upper bound on the decoded pixels of all images of a request; else 413.",
        "One image has at most 64,000,000.",
    )  # fmt: skip
    max_audio_seconds: float = option(
        600.0, kinds.seconds(),
        "Upper bound on the length of all sounds of a request, in seconds; else 413.",
        "One sound has at most 600, or --max-batch-seconds if the model cannot cut it.",
    )  # fmt: skip
    max_characters: int = option(
        1_000_000, kinds.count(),
        "Upper bound on the characters of all texts of a request; else 413.",
        "A text counts once for each candidate label.",
    )  # fmt: skip
    max_tokens: int = option(
        16_384, kinds.count(), "Upper bound on the tokens that a request may generate; else 413.",
        "Tokens of an answer × answers × prompts. An answer counts 256 if max_new_tokens is left "
        "out.",
    )  # fmt: skip
    max_answers: int = option(
        256 << 20, _SIZE,
        "Upper bound on the memory of all large answers that are computed or sent, in bytes; "
        "else 413 or 503.",
        "A number has 4, and about 20 in JSON.",
        shown="256M",
    )  # fmt: skip
    opentelemetry: bool = option(
        False, kinds.FLAG,
        "Send spans of requests and batches to the collector of OTEL_EXPORTER_OTLP_ENDPOINT.",
    )  # fmt: skip
    debug: bool = option(
        False, kinds.FLAG, "Show in answers what went wrong inside; not for the public.",
    )  # fmt: skip
