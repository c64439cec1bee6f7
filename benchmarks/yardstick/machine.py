"""On what, and with which versions."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

__all__ = ["commit", "in_words", "machine"]

_ROOT = Path(__file__).parents[2]


def machine() -> dict[str, Any]:
    """Cores are those that this process may use."""
    info = Path("/proc/cpuinfo")
    cpu = re.search(r"model name\s*:\s*(.*)", info.read_text()) if info.exists() else None
    can_ask = hasattr(os, "sched_getaffinity")
    return {
        "cpu": cpu[1] if cpu else platform.processor(),
        "cores": len(os.sched_getaffinity(0)) if can_ask else os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
        "kernel": f"{platform.system()} {platform.release().partition('-')[0]}",
        "python": platform.python_version(),
        "load_before": round(os.getloadavg()[0], 2),
        "software": _software(),
    }


def _software() -> dict[str, str]:
    """Versions of what figures depend on beside the systems; of what is there."""
    found = {}
    for package in ("torch", "transformers", "numpy", "httptools", "uvloop", "gevent", "flask"):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    for tool, option in (("redis-server", "--version"), ("wrk", "-v")):
        with contextlib.suppress(OSError):
            said = subprocess.run([tool, option], capture_output=True, text=True).stdout
            if number := re.search(r"\d+\.\d+(\.\d+)?", said):
                found[tool] = number[0]
    return found


def in_words(machine: Mapping[str, Any]) -> str:
    """One line for tables."""
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gb']} GB, "
        f"{machine['kernel']}, Python {machine['python']}"
    )


def commit() -> str:
    """Of this clone; with a plus where files were changed since; "unknown" where there is none."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(_ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        # What the run itself writes is no change of what is measured.
        changed = git("status", "--porcelain", "--", ".", ":!docs/benchmarks", ":!CHANGELOG.md")
        return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
