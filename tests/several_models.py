"""Models of a service of several, which say where they run."""

from __future__ import annotations

import os
import sys

from served_models import Obedient


class Telling(Obedient):
    """Writes into the service's log which process it is in."""

    def init_model(self) -> None:
        super().init_model()
        sys.stderr.write(f"{type(self).__name__} runs in process {os.getpid()}\n")
        sys.stderr.flush()


class Calm(Telling):
    """Nothing happens to it."""


class Replaced(Telling):
    """It is loaded anew."""


class Killed(Telling):
    """Its process is killed."""
