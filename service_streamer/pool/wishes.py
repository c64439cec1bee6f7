"""What a process wants of a pool, in a form that two processes can compare.

Everything that decides what the pool computes, and how: the model and its code, the options of the
pool, and the versions. What only concerns the caller may differ: time limits, the cache, traces.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from ..options.kinds import options_of
from ..options.table import CallerOptions, HostPoolOptions, SharingOptions, StreamerOptions
from .canonical import canonical
from .model_code import code_of, digest

#: By name, in words that equal only what is equal.
Wishes = Mapping[str, str]

#: What only concerns the process that calls.
_OF_CALLERS = {
    each.name
    for group in (CallerOptions, HostPoolOptions, SharingOptions) for each in options_of(group)
} | {"wait_for_worker_ready"}  # fmt: skip

#: Known by a digest only: they may have keys and passwords, and errors and commands show wishes.
_HIDDEN = frozenset({"model_init_args", "model_init_kwargs", "runtime_env"})

#: Characters from which on other options are known by a digest, too.
_LONG = 200


def wishes_of(model: Any, options: StreamerOptions, version: str) -> dict[str, str]:
    """The wishes of this process.

    Args:
        version: of this package.
    """
    wishes = {
        "service_streamer": version,
        "python": f"{sys.version.split()[0]} of {sys.prefix}",
        "model": canonical(model),
        "code": code_of(model, canonical),
    }
    for each in options_of(options):
        if each.name not in _OF_CALLERS:
            words = canonical(value := getattr(options, each.name))
            is_hidden = each.name in _HIDDEN and value is not None
            wishes[each.name] = _digested(words) if is_hidden or len(words) > _LONG else words
    return wishes


def _digested(words: str) -> str:
    return f"(digest {digest(words.encode())})"


def differences(running: Wishes, wanted: Wishes) -> list[str]:
    """What differs, one by one; empty if nothing does."""
    names = [*wanted, *(name for name in running if name not in wanted)]
    return [
        f"{name} is {running.get(name, 'unknown')} there and {wanted.get(name, 'unknown')} here"
        for name in names
        if running.get(name) != wanted.get(name)
    ]
