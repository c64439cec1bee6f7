"""The unit of systemd is one, and fits the signals and exit codes of ``serve``."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from command_line import END_SECONDS, launched

UNIT = Path(__file__).parents[2] / "deploy" / "systemd" / "service-streamer.service"


def settings() -> dict[str, list[str]]:
    found = defaultdict(list)
    for name, value in re.findall(r"^(\w+)=(.*)$", UNIT.read_text(), re.MULTILINE):
        found[name].append(value)
    return found


def test_systemd_reads_it(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("there is no systemd-analyze (Debian's package systemd has it)")
    text = UNIT.read_text().replace("/opt/service-streamer/bin/service-streamer", sys.executable)
    unit = tmp_path / UNIT.name
    unit.write_text(text)
    done = subprocess.run(
        [analyze, "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False
    )
    told = [line for line in done.stderr.splitlines() if str(unit) in line or UNIT.name in line]
    # Its exit status is 0 for a setting that it does not know.
    assert (told, done.returncode) == ([], 0), done.stderr


def test_serve_takes_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    [command] = settings()["ExecStart"]
    program, *arguments = shlex.split(command)
    assert Path(program).name == "service-streamer"
    (tmp_path / "service.toml").write_text("[serve]\n")
    found = [each.replace("/etc/service-streamer", str(tmp_path)) for each in arguments]
    options = launched(monkeypatch, *found).options
    [stop] = settings()["TimeoutStopSec"]
    assert float(stop) >= options.timeout + END_SECONDS


def test_it_ends_and_starts_again_as_serve_asks_for() -> None:
    found = settings()
    assert found["Restart"] == ["on-failure"]
    assert found["RestartPreventExitStatus"] == ["2 5"], "wrong usage, and a missing package"
    assert found["KillMode"] == ["mixed"], "only the service gets the signal"
    assert "KillSignal" not in found  # SIGTERM
    assert found["ExecReload"] == ["/bin/kill -HUP $MAINPID"]
