"""Cases of parametrized tests."""

from __future__ import annotations

from typing import Any

import pytest


def long_cases(*values: Any) -> list[Any]:
    """Cases that ``make test-long`` runs, and ``make test`` does not."""
    return [pytest.param(value, marks=pytest.mark.long) for value in values]
