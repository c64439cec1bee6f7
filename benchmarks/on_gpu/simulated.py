"""A device that is none: a forward pass that sleeps as long as a device would compute.

It holds no processor, so it shows what the rest costs: how much of its time such a device would be
given work.
"""

from __future__ import annotations

import time
from typing import Any

__all__ = ["device_ms", "forward", "slow_down", "tokens_of"]

_FIXED_MS, _PER_16_TOKENS_MS = 5.0, 0.1
#: An image counts as so many tokens. Arbitrary.
_IMAGE_TOKENS = 32


def device_ms(size: int, tokens: int) -> float:
    """How long a batch takes, milliseconds."""
    return _FIXED_MS + _PER_16_TOKENS_MS * size * tokens / 16


def tokens_of(tokens: int | None) -> int:
    """Of an item; None means an image."""
    return _IMAGE_TOKENS if tokens is None else tokens


def forward(size: int, tokens: int) -> None:
    """Compute a batch."""
    time.sleep(device_ms(size, tokens) / 1e3)


def slow_down(model: Any) -> None:
    """Have each forward pass of a torch module last as long as the device's; it should be small."""
    began_at: list[float] = []

    def begin(*_: object) -> None:
        began_at.append(time.monotonic())

    def end(_: object, arguments: tuple[Any, ...], named: dict[str, Any], __: object) -> None:
        given = named.get("input_ids", named.get("pixel_values"))
        shape = (arguments[0] if given is None else given).shape
        tokens = tokens_of(shape[1] if len(shape) == 2 else None)
        ends_at = began_at.pop() + device_ms(shape[0], tokens) / 1e3
        time.sleep(max(0.0, ends_at - time.monotonic()))

    model.register_forward_pre_hook(begin)
    model.register_forward_hook(end, with_kwargs=True)
