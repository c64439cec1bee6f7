"""What is there, as torch sees it, and what nvidia-smi says while something runs.

As a program it answers with what torch sees: so no other process here touches CUDA for it.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self

from on_gpu.running import Row, answer

__all__ = ["Watch", "as_visible", "driver", "memory_used_mb"]

_SMI = "nvidia-smi"
_PERIOD_MS = 200
#: For one answer of nvidia-smi, seconds.
_PATIENCE = 30


def measure(_: Row) -> Iterator[Row]:
    found: Row = {"torch": None, "transformers": None, "cuda": None, "devices": []}
    try:
        import torch

        found |= {"torch": torch.__version__, "cuda": torch.version.cuda}
        for number, name in enumerate(_visible(torch.cuda.device_count())):
            about = torch.cuda.get_device_properties(number)
            found["devices"].append(
                {"name": about.name, "memory_gb": round(about.total_memory / 1e9, 1), "id": name}
            )
    except ImportError as error:
        found["why_not"] = f"torch cannot be imported ({error})"
    except RuntimeError as error:  # a driver that is too old, say
        found["why_not"] = f"torch cannot use the device ({error})"
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["transformers"] = importlib.metadata.version("transformers")
    yield found


def _visible(count: int) -> list[str]:
    """How each of the devices is to be named to a worker."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(number) for number in range(count)] if named is None else named.split(",")
    return [name.strip() for name in names[:count]]


def as_visible(name: str) -> str:
    """A device of ``_visible`` as ``cuda_devices`` names it: by its number among those."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [] if named is None else [each.strip() for each in named.split(",")]
    return str(names.index(name)) if name in names else name


def driver() -> str | None:
    """The version of NVIDIA's driver; None where nvidia-smi does not say."""
    rows = _ask("driver_version", [])
    return rows[0][0] if rows else None


def memory_used_mb(devices: Sequence[str]) -> float | None:
    """What all processes together hold of these devices, in MiB; None where it is not known."""
    rows = _ask("memory.used", devices)
    with contextlib.suppress(ValueError):
        return sum(float(row[0]) for row in rows) if rows else None
    return None


def _command(fields: str, devices: Sequence[str]) -> list[str]:
    chosen = ["-i", ",".join(devices)] if devices else []
    return [_SMI, f"--query-gpu={fields}", "--format=csv,noheader,nounits", *chosen]


def _ask(fields: str, devices: Sequence[str]) -> list[list[str]]:
    try:
        ran = subprocess.run(
            _command(fields, devices), capture_output=True, text=True, timeout=_PATIENCE
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.split(", ") for line in ran.stdout.splitlines()] if not ran.returncode else []


class Watch:
    """Has nvidia-smi say all the while how busy the devices are. ``with`` ends it.

    Args:
        devices: their names for nvidia-smi; with none of them nothing is watched.
    """

    def __init__(self, devices: Sequence[str]) -> None:
        self._seen: list[tuple[int, float]] = []  # when, of the monotonic clock; percent
        self._process: subprocess.Popen[str] | None = None
        if devices:
            command = [*_command("utilization.gpu", devices), "-lms", str(_PERIOD_MS)]
            with contextlib.suppress(OSError):  # it is not there: nothing is known then
                self._process = subprocess.Popen(
                    command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
                )
                threading.Thread(target=self._read, name=_SMI, daemon=True).start()

    def utilisation(self, start: int, stop: int) -> float | None:
        """Percent on average between two times, nanoseconds of the monotonic clock.

        nvidia-smi's figure is the share of its last sample, a sixth of a second to a second long,
        in which any kernel ran: not how much of the device those used.
        """
        seen = [percent for at, percent in self._seen if start < at <= stop]
        return round(statistics.fmean(seen), 1) if seen else None

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(ValueError):  # [N/A]
                self._seen.append((time.monotonic_ns(), float(line)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


if __name__ == "__main__":
    answer(measure)
