"""What NVIDIA's driver says of devices, asked in this process: load, clocks, memory, power.

NVML is a part of the driver. It makes no CUDA context, so it takes no memory of a device. A value
that a device does not report is None: a MIG instance has no load of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import statistics
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from on_gpu.closing import Closing

__all__ = ["Nvml", "Sample", "Watch", "opened"]

_LIBRARY = "libnvidia-ml.so.1"
#: Between two samples, seconds. A device renews its load every sixth of a second or more slowly.
_PERIOD = 0.1
_TEXT_SIZE = 96
_SM, _MEMORY = 1, 2  # nvmlClockType_t
_TEMPERATURE = 0  # NVML_TEMPERATURE_GPU

#: Why a clock is below what was asked for: bits of nvmlDeviceGetCurrentClocksEventReasons.
_REASONS = {
    0x2: "clocks were set",
    0x4: "power limit",
    0x8: "hardware slowdown",
    0x20: "thermal, by the driver",
    0x40: "thermal, by the hardware",
    0x80: "power brake",
}


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong),
    )  # fmt: skip


class Sample(NamedTuple):
    """One look at the devices; the mean of them.

    Attributes:
        at: nanoseconds of the monotonic clock.
        load: percent of NVML's last sample in which any kernel ran.
        sm_mhz: clock of the multiprocessors.
        watts: power.
        reasons: bits that say why a clock is lower than it could be, of all devices.
    """

    at: int
    load: float | None
    sm_mhz: float | None
    watts: float | None
    reasons: int


class Nvml(Closing):
    """The devices with these names, as ``CUDA_VISIBLE_DEVICES`` names them.

    Raises:
        OSError: there is no such library, or it does not know a device.
    """

    def __init__(self, names: Sequence[str] = ()) -> None:
        self._library: Any = ctypes.CDLL(_LIBRARY)
        if code := self._library.nvmlInit_v2():
            raise OSError(f"NVML cannot be used: error {code}")
        self._devices = [self._device(name) for name in names]

    def driver(self) -> str | None:
        text = ctypes.create_string_buffer(_TEXT_SIZE)
        code = self._call("nvmlSystemGetDriverVersion", text, ctypes.c_uint(_TEXT_SIZE))
        return None if code else text.value.decode(errors="replace")

    def about(self) -> list[dict[str, Any]]:
        """Of each device what does not change while programs run: its clocks and its limits."""
        return [
            {
                "sm_mhz_most": self._number("nvmlDeviceGetMaxClockInfo", device, _SM),
                "memory_mhz": self._number("nvmlDeviceGetClockInfo", device, _MEMORY),
                "power_limit_w": _thousandth(
                    self._number("nvmlDeviceGetEnforcedPowerLimit", device)
                ),
                "celsius": self._number("nvmlDeviceGetTemperature", device, _TEMPERATURE),
            }
            for device in self._devices
        ]

    def sample(self) -> Sample:
        clocks = [self._number("nvmlDeviceGetClockInfo", each, _SM) for each in self._devices]
        watts = [
            _thousandth(self._number("nvmlDeviceGetPowerUsage", each)) for each in self._devices
        ]
        reasons = 0
        for device in self._devices:
            reasons |= self._reasons(device)
        loads = [self._load(each) for each in self._devices]
        return Sample(time.monotonic_ns(), _mean(loads), _mean(clocks), _mean(watts), reasons)

    def memory_used_mb(self) -> float | None:
        """What all processes together hold of the devices, in MiB."""
        used = []
        for device in self._devices:
            memory = _Memory()
            if self._call("nvmlDeviceGetMemoryInfo", device, ctypes.byref(memory)):
                return None
            used.append(memory.used / 2**20)
        return sum(used) if used else None

    def close(self) -> None:
        self._library.nvmlShutdown()

    def _device(self, name: str) -> ctypes.c_void_p:
        device = ctypes.c_void_p()
        if name.isdecimal():
            code = self._call("nvmlDeviceGetHandleByIndex_v2", int(name), ctypes.byref(device))
        else:
            code = self._call("nvmlDeviceGetHandleByUUID", name.encode(), ctypes.byref(device))
        if code:
            raise OSError(f"NVML does not know the device {name}: error {code}")
        return device

    def _load(self, device: ctypes.c_void_p) -> int | None:
        load = _Utilization()
        code = self._call("nvmlDeviceGetUtilizationRates", device, ctypes.byref(load))
        return None if code else int(load.gpu)

    def _reasons(self, device: ctypes.c_void_p) -> int:
        bits = ctypes.c_ulonglong()
        # The first name is that of drivers since 535.
        for name in ("ClocksEventReasons", "ClocksThrottleReasons"):
            if not self._call(f"nvmlDeviceGetCurrent{name}", device, ctypes.byref(bits)):
                return bits.value
        return 0

    def _number(self, function: str, device: ctypes.c_void_p, *more: int) -> int | None:
        found = ctypes.c_uint()
        return None if self._call(function, device, *more, ctypes.byref(found)) else found.value

    def _call(self, function: str, *arguments: Any) -> int:
        try:
            code: int = getattr(self._library, function)(*arguments)
        except AttributeError:  # of another driver's NVML
            return -1
        return code


def opened(names: Sequence[str]) -> Nvml | None:
    """NVML with these devices; None where there is none, or none of these."""
    with contextlib.suppress(OSError):
        return Nvml(names)
    return None


class Watch(Closing):
    """Samples the devices all the while, from a thread of its own. ``with`` ends it.

    Args:
        names: of the devices; with none of them nothing is watched.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._nvml = opened(names) if names else None
        self._samples: list[Sample] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="nvml", daemon=True)
        if self._nvml is not None:
            self._thread.start()

    def memory_used_mb(self) -> float | None:
        return None if self._nvml is None else self._nvml.memory_used_mb()

    def between(self, start: int, stop: int) -> dict[str, float | str | None]:
        """Means between two times, nanoseconds of the monotonic clock; and why clocks were low.

        The load is the share of NVML's last sample, a sixth of a second to a second long, in which
        any kernel ran: not how much of the device those used.
        """
        seen = [sample for sample in list(self._samples) if start < sample.at <= stop]
        bits = 0
        for sample in seen:
            bits |= sample.reasons
        return {
            "utilisation": _mean([sample.load for sample in seen]),
            "sm_mhz": _mean([sample.sm_mhz for sample in seen]),
            "watts": _mean([sample.watts for sample in seen]),
            "slowed_by": ", ".join(why for bit, why in _REASONS.items() if bits & bit) or None,
        }

    def _watch(self) -> None:
        assert self._nvml is not None
        while not self._is_over.wait(_PERIOD):
            self._samples.append(self._nvml.sample())

    def close(self) -> None:
        self._is_over.set()
        if self._nvml is not None:
            self._thread.join()
            self._nvml.close()


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.fmean(known), 1) if known else None


def _thousandth(value: int | None) -> float | None:
    return None if value is None else value / 1000
