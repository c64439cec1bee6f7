"""The main function of a worker process."""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import select
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

from ..gpu.places import set_environment
from ..observe.record import BatchReport, StepReport
from .codec import Codec
from .memory.memory_link import Memories, Windows, link_in_worker
from .model_spec import LoadedModel, Wrapper
from .protocol import (
    EXIT_FORK_RETURNED,
    EXIT_NO_FREEZE_SUPPORT,
    EXIT_START_FAILED,
    EXIT_UNGUARDED_MAIN,
    Frame,
    FrameReader,
    FrameWriter,
)
from .serving import Boot, CodedChannel, serve_model

_FORK_RETURNED = (
    b"service_streamer: a process that the model has forked returned from the model, and ends; "
    b"in the model, let it end with os._exit\n"
)

#: Makes a worker write down the stacks of its threads, whatever they are doing.
STACKS_SIGNAL = signal.SIGUSR2


def refuse_unguarded_main() -> None:
    """In a child that is importing ``__main__`` again: end it silently; the parent says the rest.

    Called when a Streamer is built. multiprocessing has its own check, of which every worker would
    print a traceback of twenty lines.
    """
    # Set by multiprocessing while a child prepares itself; there is no public name for it.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        sys.exit(EXIT_UNGUARDED_MAIN)
    # What multiprocessing starts a frozen program with, as PyInstaller makes it. Without
    # freeze_support() the program runs anew in every worker, and would start workers of its own.
    if sys.argv[1:2] == ["--multiprocessing-fork"]:
        sys.exit(EXIT_NO_FREEZE_SUPPORT)


def run_child(boot: Boot, requests: Connection, responses: Connection, stacks: Connection) -> None:
    """Load the model, say so, and serve until the stop sentinel or the parent's end.

    Args:
        stacks: where the stacks are to go when this process crashes or is asked for them.
    """
    pid = os.getpid()
    try:
        _run(boot, requests, responses, stacks)
    except BaseException as error:
        # A thread that the model has started could prevent a normal end, and the parent would not
        # learn that this worker is dead.
        code = 1
        try:
            if isinstance(error, SystemExit) and isinstance(error.code, int | None):
                code = error.code or 0
            else:
                traceback.print_exception(error)
            if os.getpid() == pid:  # else it is a fork of the model's, and they are not its own
                for child in multiprocessing.active_children():
                    child.terminate()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:  # also if standard error is closed, say
            os._exit(code & 0xFF)


def _run(boot: Boot, requests: Connection, responses: Connection, stacks: Connection) -> None:
    leave_to_parent()
    os.set_blocking(stacks.fileno(), False)  # the parent reads it after our end only
    faulthandler.disable()  # or a forked child kept the handlers that Ray, say, put in its parent
    faulthandler.enable(stacks.fileno())
    faulthandler.register(STACKS_SIGNAL, stacks.fileno())
    set_environment(boot.variables)  # a fork server has an environment of its own
    channel = _PipeChannel(requests, responses, boot.memories)
    os.register_at_fork(after_in_child=channel.disown)
    more = None if channel.link is None else channel.link.more
    threading.Thread(
        target=_exit_with_parent, args=(requests.fileno(), more), name="parent watch", daemon=True
    ).start()
    try:
        pickled = b"" if boot.spec else channel.next_frame()
    except EOFError:  # the parent has gone before it said what to load
        sys.exit(EXIT_START_FAILED)
    serve_model(channel, boot, pickled)


def _exit_with_parent(descriptor: int, more: Windows | None) -> None:
    """End this process when the parent dies, even in the midst of a batch.

    The parent closes the request pipe only after our end, so its hanging up means that it is dead.
    A poll for no event reports hang-ups only, so this thread wakes up for nothing else.

    Args:
        more: memory of other processes. What is to be forgotten is unmapped here, since the worker
            may not get another batch.
    """
    poll = select.poll()
    poll.register(descriptor, 0)
    if more is not None:
        poll.register(more, select.POLLIN)
    while descriptor not in dict(poll.poll()):
        if more is not None and not more.take_in():
            poll.unregister(more)
    os._exit(0)


class _PipeChannel(CodedChannel):
    """The worker's ends of its pair of pipes; they block."""

    def __init__(
        self, requests: Connection, responses: Connection, memories: Memories | None
    ) -> None:
        self.link = link_in_worker(memories)
        super().__init__(Codec(None if self.link is None else self.link.arena))
        self._is_forked = False
        self._connections = requests, responses  # they close their descriptors when collected
        self._reader = FrameReader(requests.fileno())
        self._frames: collections.deque[Frame] = collections.deque()  # read, not yet received
        self.writer = FrameWriter(responses.fileno())
        self._write_lock = threading.Lock()
        self._poll = select.poll()
        self._poll.register(requests.fileno(), select.POLLIN)

    def disown(self) -> None:
        """In a process that the model has forked: its parent is the worker, and it is not."""
        self._is_forked = True

    def check_owner(self) -> None:
        """End a fork that came back from the model: it must not answer, nor take a batch.

        Else the parent would get two answers to a batch, and the two processes would steal each
        other's bytes. Not a normal end, which would run the exit functions of the worker.
        """
        if self._is_forked:
            try:
                os.write(2, _FORK_RETURNED)  # without locks, which another thread may have held
            finally:
                os._exit(EXIT_FORK_RETURNED)

    def receive(self) -> tuple[Any, ...] | None:
        frame = self.next_frame()
        received: tuple[Any, ...] | None = pickle.loads(frame) if frame else None
        return received

    def is_waiting(self) -> bool:
        return bool(self._frames or self._poll.poll(0))

    def attach(self, model: LoadedModel) -> None:
        if self.link is None:
            return
        model.view = self.link.view
        if isinstance(model.managed, Wrapper):
            model.managed.view = model.view

    def advise(self, error: BaseException) -> str:
        if isinstance(error, (AttributeError, ImportError)) and "__mp_main__" in str(error):
            return (
                ". Workers import the main module under another name: define classes and functions "
                "outside of `if __name__ == '__main__':`, or in a module of their own"
            )
        return super().advise(error)

    def next_frame(self) -> Frame:
        self.check_owner()
        while not self._frames:
            self._frames.extend(self._reader.read())
        return self._frames.popleft()

    def _receive(self, payloads: list[Any], *more: Any) -> None:
        if self.link is not None:
            self.link.expect(len(payloads))  # as many results
            if more and more[0]:
                self.link.release(more[0])
            if tuple in map(type, payloads):
                self.link.receive(payloads)

    def _lend(self, report: BatchReport | StepReport, payloads: list[Any]) -> None:
        """The wires of large payloads go with the report, and the blocks that it releases."""
        if self.link is not None:
            released = self.link.lend(payloads)
            if released or tuple in map(type, payloads):
                report.released = released

    def send_raw(self, message: tuple[Any, ...]) -> None:
        """Send what is encoded already."""
        self.check_owner()
        pickled = _pickled(message)
        with self._write_lock:  # this thread may end the worker while another one answers
            if not self.writer.write(pickled):
                self.writer.flush()  # a signal came in between; this end blocks until it is done


def _pickled(value: Any) -> bytes:
    return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)


_LEFT_TO_PARENT = (signal.SIGTERM, signal.SIGHUP)
_OF_GROUPS = (*_LEFT_TO_PARENT, signal.SIGINT)


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Hold these signals back in this thread, and in a process that is started within the block.

    So none of them ends a worker that has just been started, before ``leave_to_parent``. This
    thread gets them after the block, its process at once if another thread takes them.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        # Within the block, since it may raise the KeyboardInterrupt that came just before.
        signal.pthread_sigmask(signal.SIG_BLOCK, _OF_GROUPS)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_to_parent() -> None:
    """In a worker, before the model is loaded: have these signals do nothing from now on.

    By a handler and not by ignoring them: what is ignored stays so in every program that the model
    starts, which SIGTERM could not end then. A handler of the model's own replaces ours.
    """
    # A forked worker has its parent's: a signal would wake the parent.
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in _LEFT_TO_PARENT:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, _do_nothing)
            signal.siginterrupt(number, False)  # nor should it disturb native code that waits
    os.register_at_fork(after_in_child=_take_again)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _OF_GROUPS)


def _do_nothing(*_: object) -> None:
    """The handler."""


def _take_again() -> None:
    """In a process that the model has forked: its parent may end it."""
    for number in _LEFT_TO_PARENT:
        if signal.getsignal(number) is _do_nothing:
            signal.signal(number, signal.SIG_DFL)
