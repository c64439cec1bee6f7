"""A virtual environment for each project, with exactly what its pins name."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping
from pathlib import Path

__all__ = [
    "BENCHMARKS",
    "PROJECTS",
    "ROOT",
    "InstallFailed",
    "environment",
    "install",
    "python",
    "version",
]

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
#: Projects, each with the package that its version is that of.
PROJECTS = {
    "this": "service_streamer",
    "original": "service_streamer",
    "batched": "batched",
    "litserve": "litserve",
    "mosec": "mosec",
    "mlserver": "mlserver",
    "ray": "ray",
    "infinity": "infinity_emb",
}


#: For all packages of one project, seconds.
_PIP_TIMEOUT = 900.0


class InstallFailed(Exception):
    """A project's environment could not be made."""


def python(project: str) -> str:
    """Its interpreter."""
    if project == "this":
        return sys.executable
    return str(_folder(project) / "bin" / "python")


def install(project: str) -> None:
    """Make its environment, unless it is there. Raises InstallFailed."""
    if project == "this":
        return
    folder, pins = _folder(project), _pins(project)
    stamp = folder / "complete"
    wanted = hashlib.sha256(pins.read_bytes()).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted:
        return
    print(f"installing {project} into {folder.relative_to(ROOT)} ...", file=sys.stderr, flush=True)
    pip = [python(project), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    try:
        venv.create(folder, with_pip=True, clear=True)
        run = subprocess.run(
            [*pip, "-r", str(pins)], stderr=subprocess.PIPE, text=True, timeout=_PIP_TIMEOUT
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise InstallFailed(f"no environment could be made for {pins.name}: {error}") from error
    if run.returncode:
        raise InstallFailed(f"pip could not install {pins.name}:\n{run.stderr[-2000:]}")
    stamp.write_text(wanted)


def version(project: str) -> str:
    """Of the project's package, as it is pinned; of this one, as it is."""
    if project == "this":
        import service_streamer

        return service_streamer.__version__
    package = PROJECTS[project]
    lines = _pins(project).read_text().splitlines()
    return next(line for line in lines if line.startswith(f"{package}==")).partition("==")[2]


def environment(**more: str) -> Mapping[str, str]:
    """In which everything runs: the models can be imported, and nobody reports to anybody."""
    folders = (BENCHMARKS, ROOT / "example")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "PYTHONUNBUFFERED": "1",
        # Where the workloads find torch in an interpreter that has none.
        "YARDSTICK_PACKAGES": sysconfig.get_path("purelib"),
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        **more,
    }


def _folder(project: str) -> Path:
    return ROOT / ".rivals" / project


def _pins(project: str) -> Path:
    return BENCHMARKS / "adapters" / "pins" / f"{project}.txt"
