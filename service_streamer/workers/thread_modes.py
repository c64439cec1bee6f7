"""Modes of torch that belong to a thread, for those threads in which stages run.

A model that switches gradients off in ``init_model`` does it for the thread that calls it. In
another one ``postprocess`` would raise for a layer's parameters, and only while batches overlap.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

from .device import cuda_in_use


def thread_modes() -> Callable[[], None]:
    """What gives another thread this one's modes: whether it computes gradients, and the devices.

    The function is to be called in the other thread. Neither raises.
    """
    torch: Any = sys.modules.get("torch")
    has_gradients, device, number = True, None, 0
    with contextlib.suppress(Exception):  # there is none, or it is half loaded, or an old one
        has_gradients = torch.is_grad_enabled()
        device = torch.get_default_device()
        cuda = cuda_in_use()
        number = 0 if cuda is None else cuda.current_device()

    def take_over() -> None:
        with contextlib.suppress(Exception):
            if number:
                torch.cuda.set_device(number)
            if not has_gradients:
                torch.set_grad_enabled(False)
            if device is not None and device.type != "cpu":  # it costs at each call of torch
                torch.set_default_device(device)

    return take_over
