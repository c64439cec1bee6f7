"""What the benchmarks share: both interpreters, processes of their own, and the machine's name."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import signal
import subprocess
import sys
import venv
from collections.abc import Mapping
from pathlib import Path

__all__ = [
    "ENVIRONMENT",
    "OURS",
    "ROOT",
    "THEIRS",
    "RunFailed",
    "end_group",
    "install_original",
    "install_rival",
    "machine",
    "output_of",
    "rival",
    "terminate_cleanly",
    "version_of",
]

ROOT = Path(__file__).parent.parent
_ORIGINAL = ROOT / ".original"
_WITH_ORIGINAL = ("service_streamer==0.1.2", "flask", "gevent", "numpy")
_RIVALS = ROOT / "benchmarks" / "rivals"
OURS = sys.executable
THEIRS = str(_ORIGINAL / "bin" / "python")
#: So that the models can be imported; not for the package, which each interpreter has installed.
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT / 'benchmarks'}:{ROOT / 'example'}"}


class RunFailed(Exception):
    """A script ended with an error, or not in time."""


def output_of(
    python: str,
    script: str,
    *arguments: str,
    timeout: float = 300,
    environment: Mapping[str, str] = ENVIRONMENT,
) -> str:
    """What a script of this folder prints, run in a process of its own; nothing of it is left.

    Raises:
        RunFailed: it ended with an error, or not within ``timeout`` seconds.
    """
    command = [python, str(ROOT / "benchmarks" / script), *arguments]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        raise RunFailed(f"{' '.join(command)} did not end within {timeout:g} s") from None
    finally:
        end_group(process)
    if process.returncode:
        raise RunFailed(f"{' '.join(command)} failed:\n{errors}")
    return output


def end_group(process: subprocess.Popen[str]) -> None:
    """Kill a process with all that it has started: the original's workers outlive it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def terminate_cleanly() -> None:
    """Have SIGTERM end this process as an error does, so that what it has started ends too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def install_original() -> None:
    """A virtual environment of its own: both packages have the same name."""
    needed = " ".join(_WITH_ORIGINAL)
    stamp = _ORIGINAL / "complete"
    if stamp.exists() and stamp.read_text() == needed:
        return
    print("installing the original into .original ...", file=sys.stderr)
    venv.create(_ORIGINAL, with_pip=True, clear=True)
    pip = [THEIRS, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    constraints = ["-c", str(ROOT / "constraints.txt")]
    subprocess.run([*pip, *constraints, *_WITH_ORIGINAL], check=True)
    stamp.write_text(needed)


def rival(name: str) -> str:
    """The interpreter of its virtual environment."""
    return str(ROOT / ".rivals" / name / "bin" / "python")


def install_rival(name: str) -> None:
    """Makes a virtual environment of its own, with exactly what ``rivals/NAME.txt`` names."""
    folder = ROOT / ".rivals" / name
    needed = _RIVALS / f"{name}.txt"
    stamp = folder / "complete"
    version = hashlib.sha256(needed.read_bytes()).hexdigest()
    if stamp.exists() and stamp.read_text() == version:
        return
    print(f"installing {name} into {folder.relative_to(ROOT)} ...", file=sys.stderr)
    venv.create(folder, with_pip=True, clear=True)
    pip = [rival(name), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "-r", str(needed)], check=True)
    stamp.write_text(version)


def version_of(package: str, file: str = "") -> str:
    """Of a rival's package, as it is pinned; in FILE.txt, or in that of its name."""
    lines = (_RIVALS / f"{file or package}.txt").read_text().splitlines()
    return next(line for line in lines if line.startswith(f"{package}==")).partition("==")[2]


def machine() -> str:
    cpu = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
    name = cpu[1] if cpu else platform.processor()
    return f"{name}, {os.cpu_count()} cores, Python {platform.python_version()}"
