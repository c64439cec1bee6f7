"""What the end of a worker process means, in words. Pure."""

from __future__ import annotations

import signal

from ..errors import StreamerError, WorkerLost, WorkerStartError

__all__ = [
    "EXIT_DEVICE_FAILED",
    "EXIT_FORK_RETURNED",
    "EXIT_NO_FREEZE_SUPPORT",
    "EXIT_START_FAILED",
    "EXIT_UNGUARDED_MAIN",
    "MAIN_FAILURES",
    "counted",
    "diagnose",
    "obituary",
]

#: Exit codes of ours. Not 1 or 2, which Python itself uses.
EXIT_START_FAILED = 3
EXIT_FORK_RETURNED = 70  # EX_SOFTWARE of sysexits.h
EXIT_DEVICE_FAILED = 74  # EX_IOERR
EXIT_UNGUARDED_MAIN = 78  # EX_CONFIG of sysexits.h
EXIT_NO_FREEZE_SUPPORT = 79

#: What is wrong with the main module, by exit code: another try would end likewise.
MAIN_FAILURES = {
    EXIT_UNGUARDED_MAIN: (
        "the Streamer is built while the main module is imported, and every worker imports "
        "that module again: build it under `if __name__ == '__main__':`, or in a function "
        "that only the web process calls"
    ),
    EXIT_NO_FREEZE_SUPPORT: (
        "this is a frozen program, which every worker runs again: call "
        "multiprocessing.freeze_support() first of all under `if __name__ == '__main__':`"
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
    """The error for what a dead worker leaves undone: how it ended, why probably, what to do.

    Args:
        worker: its number and process id.
        killed_for: why we have killed it, if we have.
        device_fault: what its GPU said, if it has ended for that.
    """
    if exit_code in MAIN_FAILURES and not is_ready:
        return WorkerStartError(MAIN_FAILURES[exit_code])
    if killed_for is not None:
        end = f"{worker} was killed: {killed_for}"
        return WorkerLost(end) if is_ready else WorkerStartError(end)
    if device_fault is not None:
        return WorkerLost(
            f"{worker} ended itself, since its GPU failed with an error after which no call to it "
            f"succeeds in the same process: {device_fault}"
        )
    end = diagnose(exit_code)
    if is_ready:
        return WorkerLost(f"{worker} died: {end}")
    if exit_code == 1:  # as Python ends for an exception; one of the model's would be told
        end += ", probably because importing the main module again raised an exception"
    return WorkerStartError(
        f"{worker} died before it had loaded its model: {end}; its standard error says more"
    )


_LIKELY_CAUSES = {
    signal.SIGKILL: "perhaps out of memory, or killed by someone",
    signal.SIGSEGV: "a crash in native code",
    signal.SIGBUS: "a crash in native code, or shared memory exhausted",
    signal.SIGABRT: "native code gave up",
    signal.SIGILL: "native code built for another processor",
    signal.SIGTERM: "somebody asked it to end",
}


def counted(number: int, noun: str) -> str:
    """ "1 item", "2 items"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def diagnose(exit_code: int | None) -> str:
    """What an exit code means, in words."""
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
