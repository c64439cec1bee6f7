"""What somebody who starts a service reads while its model is loaded."""

from __future__ import annotations

import logging
import sys
import threading
import time

logger = logging.getLogger(__name__)

#: Seconds between two lines that say that a model still loads, where a line cannot be redrawn.
_PATIENCE = 15.0


class LoadingProgress:
    """Says that a model is loading, for as long as it is, so that it does not look like a hang."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._began = time.monotonic()
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._can_redraw = sys.stderr.isatty()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def __enter__(self) -> LoadingProgress:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._thread.join()

    def close(self) -> None:
        """It is loaded, or never will be."""
        with self._lock:
            if not self._is_over.is_set() and self._can_redraw:
                sys.stderr.write("\r\x1b[K")
            self._is_over.set()

    def _run(self) -> None:
        self._say()
        while not self._is_over.wait(0.5 if self._can_redraw else _PATIENCE):
            self._say()

    def _say(self) -> None:
        seconds = time.monotonic() - self._began
        with self._lock:
            if self._is_over.is_set():
                return
            if self._can_redraw:
                sys.stderr.write(f"\r\x1b[Kwaiting for {self._what} ... {seconds:.0f} s")
                sys.stderr.flush()
            else:
                logger.info("waiting for %s ... %.0f s", self._what, seconds)
