"""Explain the end of a worker process. Pure."""

from __future__ import annotations

import signal

from ..errors import StreamerError, WorkerLost, WorkerStartError

#: Our exit codes; Python itself uses 1 and 2.
EXIT_START_FAILED = 3
EXIT_FORK_RETURNED = 70  # EX_SOFTWARE of sysexits.h
EXIT_DEVICE_FAILED = 74  # EX_IOERR
EXIT_UNGUARDED_MAIN = 78  # EX_CONFIG of sysexits.h
EXIT_NO_FREEZE_SUPPORT = 79

#: Errors of the main module by exit code; a retry would fail too.
MAIN_FAILURES = {
    EXIT_UNGUARDED_MAIN: (
        "the Streamer is built while the main module is imported, and every worker imports "
        "that module again: build it under `if __name__ == '__main__':`, or in a function "
        "that only the web process calls"
    ),
    EXIT_NO_FREEZE_SUPPORT: (
        "this is a frozen program, which every worker runs again: call "
        "multiprocessing.freeze_support() first under `if __name__ == '__main__':`"
    ),
}


def obituary(
    worker: str,
    exit_code: int | None,
    *,
    is_ready: bool,
    killed_for: str | None = None,
    device_fault: str | None = None,
) -> StreamerError:
    """The error for a dead worker's calls: how it ended, the likely cause, what to do.

    Args:
        worker: its number and process id.
        killed_for: why we killed it, if we did.
        device_fault: its GPU's error, if it ended because of that.
    """
    if exit_code in MAIN_FAILURES and not is_ready:
        return WorkerStartError(MAIN_FAILURES[exit_code])
    if killed_for is not None:
        end = f"{worker} was killed: {killed_for}"
        return WorkerLost(end) if is_ready else WorkerStartError(end)
    if device_fault is not None:
        return WorkerLost(
            f"{worker} ended itself, since its GPU failed with an error after which every call to "
            f"it fails in the same process: {device_fault}"
        )
    end = diagnose(exit_code)
    if is_ready:
        return WorkerLost(f"{worker} died: {end}")
    if exit_code == 1:  # Python's exit code after an exception; the model's would be reported
        end += ", probably because importing the main module again raised an exception"
    return WorkerStartError(
        f"{worker} died before it had loaded its model: {end}; see its standard error"
    )


_LIKELY_CAUSES = {
    signal.SIGKILL: "perhaps out of memory, or killed by a user",
    signal.SIGSEGV: "a crash in native code",
    signal.SIGBUS: "a crash in native code, or shared memory exhausted",
    signal.SIGABRT: "native code aborted",
    signal.SIGILL: "native code built for another processor",
    signal.SIGTERM: "it was asked to end",
}


def counted(number: int, noun: str) -> str:
    """ "1 item", "2 items"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def diagnose(exit_code: int | None) -> str:
    """Explain an exit code."""
    if exit_code is None:
        return "for an unknown reason"
    if exit_code >= 0:
        return f"it exited with code {exit_code}"
    try:
        number = signal.Signals(-exit_code)
    except ValueError:
        return f"killed by signal {-exit_code}"
    cause = _LIKELY_CAUSES.get(number)
    return f"killed by {number.name}" + (f" ({cause})" if cause else "")
