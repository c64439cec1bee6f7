"""Models on the hub: one commit for all workers, and the cache while the hub is away."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import serve_process
from command_line import error_of
from hub_stub import Hub
from service_streamer import Streamer
from service_streamer.pipelines import PipelineModel
from service_streamer.pipelines.hub import HubModel, name_and_revision, remember, resolve
from tiny_models import DEFAULT_MODEL

pytestmark = pytest.mark.xdist_group("transformers")

constants: Any = pytest.importorskip("huggingface_hub.constants")

NAME = "org/infilling"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, in this process and in those that it starts."""
    folder = tmp_path / "cache"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setenv("HF_HUB_CACHE", str(folder))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return folder


@pytest.fixture
def server(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            server.url + "/{repo_id}/resolve/{revision}/{filename}",
        )
        monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", server.url)
        yield server


@pytest.fixture
def changed(tmp_path: Path) -> Path:
    """The shipped model with another configuration: the next commit."""
    folder = tmp_path / "changed"
    shutil.copytree(DEFAULT_MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "next": True}))
    return folder


def store(cache: Path, name: str, commit: str, folder: Path, revision: str = "main") -> None:
    """Put a model into the cache, as the hub's library does."""
    model = cache / ("models--" + name.replace("/", "--"))
    shutil.copytree(folder, model / "snapshots" / commit)
    (model / "refs").mkdir(exist_ok=True)
    (model / "refs" / revision).write_text(commit)


# -- which commit


@pytest.mark.parametrize(
    ("model", "revision", "expected"),
    [
        ("org/model", None, ("org/model", None)),
        ("org/model", "v1", ("org/model", "v1")),
        ("org/model@v1", None, ("org/model", "v1")),
        ("org/model@v1", "v1", ("org/model", "v1")),
        ("org/model@refs/pr/1", None, ("org/model", "refs/pr/1")),
        ("a@", None, "must be name@revision"),
        ("@v1", None, "must be name@revision"),
        ("a@v1", "v2", "give one"),
    ],
)
def test_a_name_may_have_its_revision(
    model: str, revision: str | None, expected: tuple[str, str | None] | str
) -> None:
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            name_and_revision(model, revision)
    else:
        assert name_and_revision(model, revision) == expected


def test_the_hub_says_what_a_branch_means(server: Hub, changed: Path) -> None:
    commit = server.publish(NAME, DEFAULT_MODEL)
    other = server.publish(NAME, changed, "v2")
    assert resolve(NAME) == HubModel(NAME, "main", commit, "fill-mask")
    assert resolve(NAME, "v2") == HubModel(NAME, "v2", other, "fill-mask")
    assert resolve(NAME, commit) == HubModel(NAME, commit, commit, "fill-mask")
    assert resolve(NAME, "main", other).commit == other, "it was found out before"


@pytest.fixture(params=["hang", "503", "refuse", "offline"])
def away(
    request: pytest.FixtureRequest, server: Hub, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """Why the hub cannot be reached, as a pattern."""
    server.mode = request.param
    if server.mode == "refuse":
        server.close()
    if server.mode == "offline":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    # On a busy machine the client may notice first that nothing comes.
    yield {"hang": "no answer within 0.5 s|timed out", "503": "503", "refuse": "",
           "offline": "HF_HUB_OFFLINE"}[server.mode]  # fmt: skip
    server.released.set()


def test_the_cache_says_the_commit_at_once_without_the_hub(away: str, cache: Path) -> None:
    commit = "0123456789" * 4
    store(cache, NAME, commit, DEFAULT_MODEL)
    for revision in (None, commit):
        found = resolve(NAME, revision, briefly=0.5)
        assert found.commit == commit
        assert found.options == {"revision": commit, "local_files_only": True}
        assert re.search(away, found.away)


@pytest.mark.usefixtures("away")
def test_a_model_that_hub_and_cache_lack_is_named_with_both(server: Hub, cache: Path) -> None:
    store(cache, NAME, "0" * 40, DEFAULT_MODEL, "v1")
    with pytest.raises(FileNotFoundError) as error:
        resolve(NAME, patiently=0.5)
    assert "\n" not in str(error.value)
    for word in ("'org/infilling'", server.url, "'main'", str(cache)):
        assert word in str(error.value)


def test_a_model_that_the_hub_refuses_is_named(server: Hub) -> None:
    server.publish(NAME, DEFAULT_MODEL)
    with pytest.raises(FileNotFoundError, match=f"no model 'org/none' at {server.url}, nor a fold"):
        resolve("org/none")
    with pytest.raises(FileNotFoundError, match="has no revision 'v9'"):
        resolve(NAME, "v9")
    with pytest.raises(FileNotFoundError, match="cannot be the name of a model"):
        resolve("no..name")


def test_a_cached_model_is_served_when_the_hub_refuses_it(server: Hub, cache: Path) -> None:
    store(cache, NAME, "0" * 40, DEFAULT_MODEL)
    found = resolve(NAME)  # a token that is not valid any more, say
    assert (found.commit, "RepositoryNotFoundError" in found.away) == ("0" * 40, True)


def test_the_cache_learns_what_a_branch_means(cache: Path) -> None:
    commit = "0123456789" * 4
    references = cache / "models--org--infilling" / "refs"
    for revision, known, away in (
        ("main", None, ""),
        (commit, commit, ""),
        ("main", commit, "away"),
        ("../../../main", commit, ""),
    ):
        remember(HubModel(NAME, revision, known, away=away))
        assert not cache.exists()
    for revision in ("main", "refs/pr/1"):
        remember(HubModel(NAME, revision, commit))
        assert (references / revision).read_text() == commit


def test_a_cache_may_be_unwritable(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write_text("no folder")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    remember(HubModel(NAME, "main", "0" * 40))
    with pytest.raises(FileNotFoundError, match="cache"):
        resolve(NAME)


# -- in workers


@pytest.mark.long
def test_a_worker_that_is_started_again_loads_the_same_commit(server: Hub, changed: Path) -> None:
    commit = server.publish(NAME, DEFAULT_MODEL)
    kwargs = {"model": NAME, "revision": "main", "commit": commit}
    describe = {"do": "describe", "inputs": None, "parameters": {}}
    with Streamer(
        PipelineModel, cuda_devices=("cpu",), model_init_kwargs=kwargs, worker_timeout=None
    ) as streamer:
        for has_changed in (False, True):
            assert streamer.predict([describe])[0]["revision"] == commit
            if has_changed:
                server.mode = "hang"
            server.publish(NAME, changed)
            streamer.restart_workers()
        assert streamer.predict([describe])[0]["revision"] == commit
        server.released.set()


def test_a_gated_model_says_what_to_do(server: Hub) -> None:
    server.publish(NAME, DEFAULT_MODEL)
    server.gated.add(NAME)
    with pytest.raises(FileNotFoundError) as error:
        PipelineModel().init_model(NAME)
    for word in ("gated", f"{server.url}/{NAME}", "HF_TOKEN"):
        assert word in str(error.value)


def test_a_cache_with_a_part_of_the_model_says_which_is_missing(server: Hub, cache: Path) -> None:
    store(cache, NAME, "0" * 40, DEFAULT_MODEL)
    server.close()
    for file in (cache / "models--org--infilling" / "snapshots" / ("0" * 40)).iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            file.unlink()
    with pytest.raises(
        FileNotFoundError, match=f"no tokenizer in the cache .* the hub {server.url}"
    ):
        PipelineModel().init_model(NAME)


def test_a_folder_has_no_revision() -> None:
    with pytest.raises(ValueError, match="is for a model on the hub"):
        PipelineModel().init_model(DEFAULT_MODEL, revision="main")


# -- the command line


@pytest.mark.long
def test_serve_pins_the_commit_and_shows_it(server: Hub, cache: Path, changed: Path) -> None:
    server.publish(NAME, DEFAULT_MODEL)
    commit = server.publish(NAME, changed, "v2")
    for model in ([NAME, "--revision", "v2"], [f"{NAME}@v2"]):
        with serve_process.Serving(*model, "--workers", "1") as service:
            assert service.client.get("/info").json()["revision"] == commit
            service.terminate()
    asked = [path for path in server.asked if path.startswith("/api/models")]
    assert f"/api/models/{NAME}/revision/v2" in asked
    reference = cache / "models--org--infilling" / "refs" / "v2"
    assert reference.read_text() == commit, "for a start without the hub"


@pytest.mark.long
def test_serve_starts_from_the_cache_while_the_hub_hangs(server: Hub, cache: Path) -> None:
    """It took 61 s before."""
    store(cache, NAME, "0" * 40, DEFAULT_MODEL)
    server.mode = "hang"
    with serve_process.Serving(NAME) as service:
        assert service.client.get("/info").json()["revision"] == "0" * 40
        assert "no answer within 3 s" in service.log()
    asked = [path for path in server.asked if path.startswith("/api/models/")]
    assert len(asked) <= 3, "each may take 3 s"
    server.released.set()


@pytest.mark.parametrize("role", ["serve", "worker"])
def test_serving_a_model_that_the_hub_lacks_ends_with_3(server: Hub, role: str) -> None:
    # The processes have HF_ENDPOINT and the like of this one's environment.
    done = serve_process.run(role, "org/none", *(("--port", "0") if role == "serve" else ()))
    assert done.returncode == 3
    assert f"there is no model 'org/none' at {server.url}" in done.stderr


@pytest.mark.parametrize(
    "arguments", [(), (str(DEFAULT_MODEL),), ("served_models:double",), ("--redis", "localhost")]
)
def test_a_revision_is_for_models_on_the_hub(arguments: tuple[str, ...]) -> None:
    assert "--revision" in error_of("serve", *arguments, "--revision", "v1")
