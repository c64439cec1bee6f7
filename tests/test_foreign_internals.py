"""Private parts of other packages that this one relies on, and bounds of their versions.

What a missing part breaks is seen by the tests of that feature. Here is what would break silently.
"""

from __future__ import annotations

import configparser
import multiprocessing.process
import re
from pathlib import Path
from typing import Any

#: Packages whose internals are patched or called: a new version may break them silently.
BOUNDED = {"httptools", "pytest", "ray", "redis", "transformers"}


def test_versions_have_upper_bounds() -> None:
    config = configparser.ConfigParser()
    config.read(Path(__file__).parent.parent / "setup.cfg")
    lines = "\n".join(config["options.extras_require"].values()).splitlines()
    bounded = {re.split(r"[<>=]", line)[0] for line in lines if "<" in line}
    assert bounded == BOUNDED


def test_new_processes_know_their_folder_and_key() -> None:
    """workers/starting.py relies on these: for the folder and the key of new processes."""
    process: Any = multiprocessing.process
    assert isinstance(process.current_process()._config, dict)
    assert issubclass(process.AuthenticationString, bytes)
    assert isinstance(process.ORIGINAL_DIR, str)
