"""Batches by hand, computed in a process of its own while the system beside it has nothing to do.

``python -m adapters.beside WORKLOAD COUNT`` is that process. For each line of its input, a number
of seconds, it prints the rate that it had; it ends with its input. ``Beside`` starts it and asks.
"""

from __future__ import annotations

import os
import subprocess
import sys

from adapters.direct_adapter import Direct, rate
from adapters.workloads import BATCH_SIZE, items

__all__ = ["Beside", "main"]


class Beside:
    """The process, seen from the one that has the system; each computes only when asked to.

    Args:
        count: the items that are computed over and over.
    """

    def __init__(self, workload: str, count: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "adapters.beside", workload, str(count)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def rate(self, seconds: float) -> float:
        """Items per second of batches by hand, computed now and for at least ``seconds``.

        Raises:
            RuntimeError: the process has ended. What it wrote to stderr says why.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print(seconds, file=self._process.stdin, flush=True)
        except BrokenPipeError:
            said = ""
        else:
            said = self._process.stdout.readline()
        if not said:
            raise RuntimeError(f"batches by hand ended with exit code {self._process.wait()}")
        return float(said)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def main(workload: str, count: int) -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # where the prints of libraries may go
    model = Direct(workload, 1, {})
    work = items(workload, count)
    for line in sys.stdin:
        # What others have put into the caches meanwhile is none of its time.
        rate(model, work[:BATCH_SIZE], 0.0)
        print(rate(model, work, float(line)), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
