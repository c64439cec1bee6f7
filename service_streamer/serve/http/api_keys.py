"""The file of --api-key-file: a table for each key, with the hash of the key. Pure.

    [alice]
    hash = "sha256:9f86d0..."          # service-streamer key new alice
    scopes = ["compute", "metrics"]    # default: compute
    requests-per-minute = 600
    concurrency = 8
    expires = 2027-01-31T00:00:00Z

A plain SHA-256 is right for these keys: they are 256 random bits, which nobody can guess, so a slow
hash would protect nothing. It would not be right for passwords.
"""

from __future__ import annotations

import datetime
import difflib
import hashlib
import re
import secrets
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

#: What a key may be for: the model's operations; figures and events; loading and unloading models.
COMPUTE, METRICS, ADMIN = SCOPES = ("compute", "metrics", "admin")

#: Maximum number of keys of a file. Arbitrary; bounds the time to read it.
_MOST_KEYS = 2000

#: Names are tenants, and appear in logs. Without spaces, which the tenants of --api-key have.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,63}")
_HASH = re.compile(r"sha256:([0-9a-f]{64})")

#: The largest limit; beyond it floats, in which limits are counted, are not exact.
_LARGEST = 1 << 53

_LIMITS = ("requests-per-minute", "concurrency")
_FIELDS = ("hash", "scopes", *_LIMITS, "expires")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """What is known of a key.

    Attributes:
        name: of its holder; the tenant of its requests.
        scopes: what it may be used for.
        requests_per_minute: rate that it is limited to; None for no limit.
        concurrency: maximum number of its open requests; None for no limit.
        expires: Unix time in seconds at which it ends; None for never.
    """

    name: str
    scopes: frozenset[str] = frozenset((COMPUTE,))
    requests_per_minute: int | None = None
    concurrency: int | None = None
    expires: float | None = None

    @property
    def has_limits(self) -> bool:
        return self.requests_per_minute is not None or self.concurrency is not None


def digest_of(key: bytes) -> bytes:
    """SHA-256 of a key. Keys are looked up by it, so the time of a look-up reveals nothing."""
    return hashlib.sha256(key).digest()


def new_key() -> str:
    """A random key of 256 bits. The prefix lets scanners of published code find it."""
    return f"sst_{secrets.token_urlsafe(32)}"


def check_key_name(name: str) -> str:
    """The name of a key. Raises ValueError."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"the name {name[:80]!r} of a key must have at most 64 characters: letters, digits and "
            "any of _ . @ -, the first one a letter, a digit or _"
        )
    return name


def key_table(name: str, key: str, scopes: Iterable[str]) -> str:
    """The lines for the file."""
    header = name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else f'"{name}"'
    shown = ", ".join(f'"{each}"' for each in scopes)
    return f'[{header}]\nhash = "sha256:{digest_of(key.encode()).hex()}"\nscopes = [{shown}]\n'


def read_keys(text: str) -> dict[bytes, ApiKey]:
    """The keys of a file, by their digests.

    Raises:
        ValueError: the text is no such file; says where, and what to do.
    """
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"it is not valid TOML: {error}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply; it needs a table for each key only") from None
    if len(tables) > _MOST_KEYS:
        raise ValueError(f"it has {len(tables)} keys; at most {_MOST_KEYS} are supported")
    keys: dict[bytes, ApiKey] = {}
    for name, table in tables.items():
        check_key_name(name)
        if not isinstance(table, dict):
            raise ValueError(f"{name!r} must be in the table of a key: write it below [NAME]")
        try:
            digest, key = _key(name, table)
        except ValueError as error:
            raise ValueError(f"[{name}] {error}") from None
        if digest in keys:
            raise ValueError(f"[{name}] has the hash of [{keys[digest].name}]; make a key for each")
        keys[digest] = key
    return keys


def _key(name: str, table: Mapping[str, Any]) -> tuple[bytes, ApiKey]:
    if "tokens-per-minute" in table:  # a limit of earlier versions
        raise ValueError(
            "has the field 'tokens-per-minute', which is not supported any more; delete it, and "
            "limit the key with requests-per-minute and concurrency. A gateway can limit tokens"
        )
    for field in table:
        if field not in _FIELDS:
            near = difflib.get_close_matches(field.replace("_", "-"), _FIELDS, 1)
            meant = f"did you mean {near[0]}?" if near else f"there are {', '.join(_FIELDS)}"
            raise ValueError(f"has the unknown field {field!r}; {meant}")
    found = _HASH.fullmatch(written) if isinstance(written := table.get("hash"), str) else None
    if found is None:
        raise ValueError(
            'needs hash = "sha256:" with 64 lower-case hexadecimal digits; '
            f"'service-streamer key new {name}' makes one"
        )
    limits = {each.replace("-", "_"): _limit(each, table.get(each)) for each in _LIMITS}
    key = ApiKey(name, _scopes(table.get("scopes")), **limits, expires=_end(table.get("expires")))
    return bytes.fromhex(found[1]), key


def _scopes(value: Any) -> frozenset[str]:
    if value is None:
        return frozenset((COMPUTE,))
    if not isinstance(value, list) or not value or not all(each in SCOPES for each in value):
        raise ValueError(f"scopes must be a list of any of {', '.join(SCOPES)}; not {value!r:.80}")
    return frozenset(value)


def _limit(name: str, value: Any) -> int | None:
    if value is None or (type(value) is int and 0 < value <= _LARGEST):
        return value
    if type(value) is int and value > 0:
        raise ValueError(f"{name} must be at most {_LARGEST}. Leave it out for no limit")
    raise ValueError(
        f"{name} must be a whole number of at least 1; not {value!r:.80}. Leave it out for no limit"
    )


def _end(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, datetime.datetime) and value.tzinfo is not None:
        return value.timestamp()
    raise ValueError(
        "expires must be a date and time with its offset, unquoted, such as "
        f"2027-01-31T00:00:00Z; not {value!s:.80}"
    )
