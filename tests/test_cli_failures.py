"""What is said of a model's name that means nothing, and which part of a traceback is shown."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import service_streamer
from service_streamer import WorkerStartError
from service_streamer.errors import RemoteTraceback
from service_streamer.serve.cli.failures import explain_name, reason, users_traceback

OURS = Path(service_streamer.__file__).parent


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current one, with a module that may not be imported."""
    (tmp_path / "mine.py").write_text("raise SystemExit")
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("raise SystemExit")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "model",
    [
        *("mine.Echo", "mine.echo", "pack.models.echo", "other.Echo", "mine.py", "./pack/a.py"),
        *("mine.py:Echo", "./mine.py:Echo", "pack/a.py:Echo", "mine:", ":Echo", "a:b:c"),
    ],
)
def test_names_that_mean_nothing(folder: Path, model: str, wording: Callable[..., None]) -> None:
    wording(explain_name(model))


@pytest.mark.parametrize(
    "model", ["mine:Echo", "pack.models:Echo", "gpt2", "org/name.Model", "t5-v1.1", "v1.1", "é.ü"]
)
def test_names_that_may_be_right(folder: Path, model: str) -> None:
    assert explain_name(model) is None


def started(text: str, error: Exception) -> WorkerStartError:
    failed = WorkerStartError("worker 0 could not load the model")
    failed.__cause__ = error
    error.__cause__ = RemoteTraceback(text)
    return failed


HEAD = "Traceback (most recent call last):\n"
OUR_FRAME = f'  File "{OURS}/workers/child.py", line 1, in run\n    load()\n'
FRAME = '  File "/home/me/service_streamer/mine.py", line 2, in init_model\n    1 / 0\n    ~~^~~\n'
END = "ZeroDivisionError: division by zero\n"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (HEAD + OUR_FRAME + OUR_FRAME + FRAME + END, HEAD + FRAME + END),
        (HEAD + FRAME + OUR_FRAME + END, HEAD + FRAME + OUR_FRAME + END),
        (HEAD + OUR_FRAME + END, ""),
        (END, ""),
        ("", ""),
    ],
)
def test_a_traceback_begins_with_the_users_code(text: str, shown: str) -> None:
    assert users_traceback(started(text, ZeroDivisionError()), is_own=True) == shown


def test_what_a_pipeline_is_expected_to_raise_says_all() -> None:
    text = HEAD + FRAME + END
    assert not users_traceback(started(text, FileNotFoundError()), is_own=False)
    assert users_traceback(started(text, RuntimeError()), is_own=False)
    assert not users_traceback(WorkerStartError("killed"), is_own=True)


def test_a_reason_is_one_line_without_the_traceback() -> None:
    assert reason(started(END, ZeroDivisionError("why"))) == (
        "worker 0 could not load the model: why"
    )
    alone = WorkerStartError("killed")
    alone.__cause__ = RemoteTraceback(END)
    assert reason(alone) == "killed"
