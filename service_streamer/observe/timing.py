"""Where the time of a call went."""

from __future__ import annotations

from typing import NamedTuple


class Timing(NamedTuple):
    """Where the time of a call went, in seconds; of its last batch, if it took several.

    Attributes:
        queued: it waited for a worker, or for expected calls.
        sent: on its way to the model, and behind the batch before, if there was one.
        computed: in the model.
        returned: on its way back.
        first_output: of a model of steps, from when the call was accepted to its first output: in
            the model, or of a stream in this process. None for other models, and without outputs.
        between_outputs: from one output to the next, the mean; None for less than two.
        longest_between: the longest of these times; likewise.
    """

    queued: float
    sent: float
    computed: float
    returned: float
    first_output: float | None = None
    between_outputs: float | None = None
    longest_between: float | None = None

    @property
    def total(self) -> float:
        """From when it was accepted to when its result went out to its caller."""
        return self.queued + self.sent + self.computed + self.returned
