"""What messages and docs say about optional packages works: also before a release."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

import pytest

from service_streamer.extras import PACKAGES, missing

ROOT = Path(__file__).parent.parent


def required(extra: str) -> set[str]:
    """The names of the packages that ``setup.cfg`` has for an extra."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    lines = config["options.extras_require"][extra].splitlines()
    return {re.split(r"[<>=!~\[ ;]", line)[0].lower() for line in lines if line}


@pytest.mark.parametrize("extra", PACKAGES)
def test_the_packages_that_are_named_are_those_of_the_extra(extra: str) -> None:
    assert set(PACKAGES[extra]) == required(extra)


def test_what_is_missing_comes_with_what_to_do() -> None:
    text = missing("RedisStreamer", "msgpack", "redis")
    assert text == "RedisStreamer needs msgpack: pip install hiredis msgpack redis"


def test_nothing_tells_users_to_install_the_original_of_2019() -> None:
    sources = [
        *ROOT.glob("service_streamer/**/*.*"),
        *ROOT.glob("docs/**/*.md"),
        ROOT / "README.md",
    ]
    texts = {path: path.read_text() for path in sources if path.suffix in (".py", ".md", ".html")}
    wrong = re.compile(r"install\s+(-\w+\s+)*['\"]?service[_-]streamer\b")
    assert [path for path, text in texts.items() if wrong.search(text)] == []
