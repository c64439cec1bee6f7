"""What is said of a model's name that means nothing, and which part of a traceback is shown."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import service_streamer
from command_line import error_of, launched
from service_streamer import RemoteTraceback, WorkerStartError

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
    ("model", "word"),
    [
        ("mine.Echo", "mine:Echo"),
        ("pack.models.echo", "pack.models:echo"),
        ("other.Echo", "other:Echo"),
        ("mine.py", "mine:"),
        ("./pack/a.py", "pack.a:"),
        ("mine.py:Echo", "mine:Echo"),
        ("./mine.py:Echo", "mine:Echo"),
        ("pack/a.py:Echo", "pack.a:Echo"),
        ("mine:", "'mine:'"),
        (":Echo", "':Echo'"),
        ("a:b:c", "'a:b:c'"),
    ],
)
def test_a_name_that_means_nothing_is_explained(folder: Path, model: str, word: str) -> None:
    assert word in error_of("serve", model)


@pytest.mark.parametrize(
    "model", ["mine:Echo", "pack.models:Echo", "gpt2", "org/name.Model", "t5-v1.1", "v1.1", "é.ü"]
)
def test_a_name_that_may_be_right_is_tried(
    folder: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    assert launched(monkeypatch, "serve", model).options.model == model


def started(text: str, error: Exception) -> WorkerStartError:
    failed = WorkerStartError("worker 0 could not load the model")
    failed.__cause__ = error
    error.__cause__ = RemoteTraceback(text)
    return failed


HEAD = "Traceback (most recent call last):\n"
OUR_FRAME = f'  File "{OURS}/workers/worker_main.py", line 1, in run\n    load()\n'
FRAME = '  File "/home/me/service_streamer/mine.py", line 2, in init_model\n    1 / 0\n    ~~^~~\n'
END = "ZeroDivisionError: division by zero\n"


@pytest.fixture
def shown(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Callable[..., tuple[str, str]]:
    """The traceback and the last line of a service whose model cannot be loaded."""

    def shown(failure: Exception, model: str = "mine:Echo") -> tuple[str, str]:
        caplog.clear()
        result = launched(monkeypatch, "serve", model, failure=failure).result
        assert result.exit_code == 3
        [*_, line] = result.output.splitlines()
        traceback = "".join(f"{text}\n" for text in caplog.messages)
        return traceback.partition("the model raised\n")[2], line

    return shown


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (HEAD + OUR_FRAME + OUR_FRAME + FRAME + END, HEAD + FRAME + END),
        (HEAD + FRAME + OUR_FRAME + END, HEAD + FRAME + OUR_FRAME + END),
        (HEAD + OUR_FRAME + END, ""),
        (END, ""),
        ("", ""),
    ],
)
def test_a_traceback_begins_with_the_users_code(
    shown: Callable[..., tuple[str, str]], text: str, expected: str
) -> None:
    assert shown(started(text, ZeroDivisionError()))[0] == expected


def test_an_expected_error_has_no_traceback(shown: Callable[..., tuple[str, str]]) -> None:
    text = HEAD + FRAME + END
    assert not shown(started(text, FileNotFoundError()), "bert")[0]
    assert shown(started(text, RuntimeError()), "bert")[0]
    assert not shown(WorkerStartError("killed"))[0]


def test_the_reason_is_a_line_without_the_traceback(shown: Callable[..., tuple[str, str]]) -> None:
    _, line = shown(started(END, ZeroDivisionError("why")))
    assert line.endswith("worker 0 could not load the model: why")
    alone = WorkerStartError("killed")
    alone.__cause__ = RemoteTraceback(END)
    assert shown(alone)[1].endswith(": killed")
