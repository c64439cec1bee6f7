"""The golden file of messages has nothing that no test compares with."""

from __future__ import annotations

from wording import is_there, read


def test_each_entry_has_its_test() -> None:
    assert [name for name in read() if not is_there(name)] == []
