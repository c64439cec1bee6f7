"""What items cost, asked in the worker: for its ceiling, once a batch was too large for the device.

The web process asks the same function for its batches. Here it is needed only after a batch has run
out of memory, so it is unpickled only then: a function that this process cannot import must not
keep a worker from starting.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["Measure"]

#: A larger function is not copied to the workers, bytes: it may be a method of a whole tokenizer.
#: Arbitrary.
_LARGEST = 1 << 20


class Measure:
    """The length function of a model. Belongs to one thread.

    Args:
        function: of an item. If it cannot be pickled, or is large then, the copy in a worker
            process knows no lengths.
    """

    __slots__ = ("_function", "_pickled")

    def __init__(self, function: Callable[[Any], Any] | None, pickled: bytes | None = None) -> None:
        self._function = function
        self._pickled = pickled

    def lengths(self, items: Sequence[Any]) -> list[float] | None:
        """One for each item, at least 0; None if they cannot be had, from now on."""
        try:
            if self._function is None and self._pickled is not None:
                self._function = pickle.loads(self._pickled)
            if self._function is not None:
                found = [float(self._function(item)) for item in items]
                if all(0 <= length < float("inf") for length in found):
                    return found
        except (Exception, SystemExit):  # it is the user's, and so is what it raises
            pass
        self._function = self._pickled = None
        return None

    def __reduce__(self) -> tuple[type[Measure], tuple[None, bytes | None]]:
        pickled = self._pickled
        if self._function is not None:
            try:
                pickled = pickle.dumps(self._function, pickle.HIGHEST_PROTOCOL)
            except (Exception, SystemExit):
                pickled = None
            if pickled is not None and len(pickled) > _LARGEST:
                pickled = None
        return Measure, (None, pickled)
