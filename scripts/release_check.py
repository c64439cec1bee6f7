"""Build what is published, and try it as a user gets it: make release-check

The wheel is built twice: from the sdist, and from this folder. Both must be the same, and hold the
package as git has it. Then the wheel is installed into new environments, and used from a folder
outside the repository: the core without any other package, and the server with its extra.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import urllib.request
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"

#: Of the sdist, besides the package and what setuptools writes.
BESIDE = {"CHANGELOG.md", "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.cfg"}

#: The core alone, with worker processes.
PROGRAM = """
from service_streamer import Streamer

def double(batch):
    return [2 * item for item in batch]

if __name__ == "__main__":
    with Streamer(double, worker_num=2) as streamer:
        print(streamer.predict([1, 2, 3]))
"""
QUESTION = {"inputs": "Happy birthday to [MASK].", "parameters": {"top_k": 1}}

#: Within which the server must answer, seconds: it loads torch and a model.
PATIENCE = 300


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--without-server", action="store_true", help="try only the core")
    options = parser.parse_args()
    wheel = built()
    with tempfile.TemporaryDirectory(prefix="service-streamer-release-") as name:
        folder = Path(name)
        step("the core, without any other package")
        try_core(wheel, folder)
        if not options.without_server:
            step("the server, with the extra serve")
            try_server(wheel, folder)
    step("ready to upload: dist/")


def built() -> Path:
    """Build and check both; returns the wheel."""
    shutil.rmtree(DIST, ignore_errors=True)
    # Setuptools would put what an earlier build has left there into the wheel.
    shutil.rmtree(ROOT / "build", ignore_errors=True)
    step("building the sdist, and the wheel from it")
    run([sys.executable, "-m", "build", "--outdir", str(DIST), str(ROOT)])
    (sdist,) = DIST.glob("*.tar.gz")
    (wheel,) = DIST.glob("*.whl")
    run([sys.executable, "-m", "twine", "check", "--strict", str(sdist), str(wheel)])
    with tempfile.TemporaryDirectory() as name:
        run([sys.executable, "-m", "build", "--wheel", "--outdir", name, str(ROOT)])
        (direct,) = Path(name).glob("*.whl")
        compare("the two wheels", contents(wheel), contents(direct))
    listed = run(["git", "ls-files", "service_streamer"]).splitlines()
    of_package = {name for name in contents(wheel) if ".dist-info/" not in name}
    compare("the wheel and the package in git", of_package, set(listed))
    compare("the sdist and git", source_names(sdist), {*listed, *BESIDE})
    return wheel


def contents(wheel: Path) -> dict[str, int]:
    """The checksum of each file."""
    with zipfile.ZipFile(wheel) as archive:
        return {each.filename: each.CRC for each in archive.infolist()}


def source_names(sdist: Path) -> set[str]:
    """The names in an sdist, without what setuptools writes."""
    with tarfile.open(sdist) as archive:
        names = {each.name.partition("/")[2] for each in archive.getmembers() if each.isfile()}
    return {name for name in names if name != "PKG-INFO" and ".egg-info/" not in name}


def compare(what: str, one: dict[str, int] | set[str], other: dict[str, int] | set[str]) -> None:
    """Raises SystemExit: they differ."""
    names = sorted(set(one) ^ set(other))
    if isinstance(one, dict) and isinstance(other, dict):
        names += sorted(name for name in set(one) & set(other) if one[name] != other[name])
    if names:
        raise SystemExit(f"{what} differ in: {', '.join(names)}")


def try_core(wheel: Path, folder: Path) -> None:
    python = new_environment(folder / "core")
    run([*pip(python), "install", "--quiet", "--no-index", "--no-deps", str(wheel)])
    installed = {each["name"] for each in json.loads(run([*pip(python), "list", "--format=json"]))}
    if installed - {"pip", "setuptools"} != {"service_streamer"}:
        raise SystemExit(f"the core needs nothing, but this is installed: {sorted(installed)}")
    program = folder / "program.py"
    program.write_text(PROGRAM)
    if (printed := run([str(python), str(program)], folder)) != "[2, 4, 6]\n":
        raise SystemExit(f"the core alone printed {printed!r}")


def try_server(wheel: Path, folder: Path) -> None:
    python = new_environment(folder / "server")
    constraints = str(ROOT / "constraints.txt")
    run([*pip(python), "install", "--quiet", "-c", constraints, f"{wheel}[serve]"])
    command = [str(python.parent / "service-streamer"), "serve", "--port", "0"]
    process = subprocess.Popen(
        command, cwd=folder, env=environment(), stdout=subprocess.PIPE, text=True
    )
    # A server that hangs is ended, which ends the reading below.
    alarm = threading.Timer(PATIENCE, process.kill)
    alarm.start()
    try:
        assert process.stdout is not None
        found = next(
            (url[1] for line in process.stdout if (url := re.search(r" on (http://\S+)", line))), ""
        )
        if not found:
            raise SystemExit(f"service-streamer serve ended with status {process.wait()}")
        request = urllib.request.Request(
            f"{found}/predict",
            json.dumps(QUESTION).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=PATIENCE) as response:
            answer = json.load(response)
        if answer[0]["token_str"] != "you":
            raise SystemExit(f"the server answered {answer}")
        process.send_signal(signal.SIGTERM)
        if (status := process.wait()) != 0:
            raise SystemExit(f"the server ended with status {status} after SIGTERM")
    finally:
        alarm.cancel()
        process.kill()
        process.wait()


def new_environment(folder: Path) -> Path:
    """The interpreter of a new environment."""
    venv.create(folder, with_pip=True, symlinks=True)
    return folder / "bin" / "python"


def pip(python: Path) -> list[str]:
    return [str(python), "-m", "pip", "--disable-pip-version-check"]


def environment() -> dict[str, str]:
    """Without what could make this repository importable, or configure the server."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "SERVICE_STREAMER_"))
    }


def run(command: Sequence[str], folder: Path = ROOT) -> str:
    """What a command prints to stdout. Raises SystemExit: it failed."""
    done = subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


_began = time.monotonic()


def step(what: str) -> None:
    print(f"{time.monotonic() - _began:5.1f} s: {what}", flush=True)


if __name__ == "__main__":
    main()
