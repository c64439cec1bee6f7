"""How long workers on Ray are waited for."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class RayTimes:
    """In seconds.

    Attributes:
        stop: an idle worker may take so long to end.
        stacks: one that hangs has so long to say where: a call to an actor takes a millisecond.
        last_calls: the last calls of a worker may take so long to come back when it is lost.
        placing: after so long without a place the log says what is missing.
        making: so long Ray may need to make an actor that is to be killed.
    """

    stop: float = 5.0
    stacks: float = 1.0
    last_calls: float = 5.0
    placing: float = 5.0
    making: float = 10.0


#: Of this process.
times = RayTimes()
