"""The worker's side: the class of which each worker is an actor.

Ray calls its methods, several at the same time, each in a thread. What computes is one more thread,
with the same code as in a worker process:

    driver                         actor
    ------                         -----
    compute(batch) ──────────────▶ its queue ──▶ decode, predict, encode
           ◀────────────────────── the next answer ◀────────┘

Models of steps answer when they like, so there ``take`` brings what the driver has to say, and
``reports`` waits for all that the worker has said meanwhile.
"""

from __future__ import annotations

import faulthandler
import os
import queue
import socket
import tempfile
import threading
import time
import traceback
from typing import Any

from ..gpu.places import set_environment
from ..workers.codec import Codec, Parts
from ..workers.worker_main import Boot, CodedChannel, serve_model
from .frames import Frame, frame, keep, unframed

#: The host, the process id, and the GPUs that it sees, as a variable lists them.
Whereabouts = tuple[str, int, str]


class RayWorker:
    """One worker. Its methods may be called by any number of threads.

    Args:
        boot: what it needs from the start; Ray has placed it, and set which GPUs it sees.
        spec: the pickled ``ModelSpec``.
    """

    def __init__(self, boot: Boot, spec: bytes) -> None:
        set_environment(boot.place.variables)  # before anybody asks ``where``
        self._channel = _ActorChannel()
        self._exit_code: int | None = None
        self._thread = threading.Thread(
            target=self._run, args=(boot, spec), name="service_streamer worker", daemon=True
        )
        self._thread.start()

    def where(self) -> Whereabouts:
        """It is there as soon as Ray has found a place, while the model loads."""
        return socket.gethostname(), os.getpid(), os.environ.get("CUDA_VISIBLE_DEVICES", "")

    def start(self) -> tuple[Whereabouts, Frame | None]:
        """Block until the model has been loaded; what the worker says of that. None: it has ended.

        It is called once, before all else. Where it is comes again, since Ray may answer this call
        before ``where``.
        """
        answer = self._channel.next_answer()
        return self.where(), answer

    def compute(self, batch: Frame) -> Frame | None:
        """Have a batch computed; block for the next answer, which may be another batch's."""
        self._channel.put(batch)
        return self._channel.next_answer()

    def answer(self) -> Frame | None:
        """Block for the next answer."""
        return self._channel.next_answer()

    def take(self, number: int, message: Frame) -> None:
        """What a model of steps is to know: a batch, or what becomes of one. Does not block.

        Args:
            number: of the message; from 0. Ray does not keep the order of calls.
        """
        self._channel.put_in_order(number, message)

    def reports(self) -> list[Frame] | None:
        """Block until a model of steps has something to report; all of it. None: it has ended."""
        return self._channel.next_answers()

    def stacks(self) -> str:
        """What each thread is doing now."""
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file)
            file.seek(0)
            return file.read().decode(errors="replace")

    def stop(self) -> None:
        """Let the worker end when it has answered what it has. Does not block."""
        self._channel.put(None)

    def watch(self) -> int | None:
        """Block until the worker has ended; its exit code, as a process has one."""
        self._thread.join()
        return self._exit_code

    def _run(self, boot: Boot, spec: bytes) -> None:
        try:
            serve_model(self._channel, boot, spec)
            self._exit_code = 0
        except SystemExit as error:
            code = error.code
            self._exit_code = code & 0xFF if isinstance(code, int) else int(code is not None)
        except BaseException:
            traceback.print_exc()  # which Ray shows to the driver, and keeps
            self._exit_code = 1
        finally:
            self._channel.close()


class _ActorCodec(Codec):
    """Items are views of Ray's memory."""

    def decode(self, payload: Any) -> Any:
        return payload.view() if type(payload) is Parts else super().decode(payload)


class _ActorChannel(CodedChannel):
    """What goes in and out of the thread that computes."""

    advice = (
        ". Define it in a module that the workers on the cluster can import, or bring it there by "
        'runtime_env={"working_dir": "."}'
    )

    def __init__(self) -> None:
        super().__init__(_ActorCodec(keep))
        self._batches: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # None comes after the last one, and stays.
        self._answers: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._order = threading.Lock()
        self._expected = 0
        self._early: dict[int, Frame] = {}

    # -- by the threads of Ray

    def put(self, message: Frame | None) -> None:
        """Bring a message; None to end."""
        self._batches.put(message)

    def put_in_order(self, number: int, message: Frame) -> None:
        """Bring a message, when those with a smaller number have come."""
        with self._order:
            self._early[number] = message
            while self._expected in self._early:
                self.put(self._early.pop(self._expected))
                self._expected += 1

    def next_answer(self) -> Frame | None:
        """Block for an answer; None if there will be no more."""
        answer = self._answers.get()
        if answer is None:
            self.close()  # for the next one who asks
        return answer

    def next_answers(self) -> list[Frame] | None:
        """Block for answers: all that there are. None if there will be no more."""
        answer = self.next_answer()
        answers: list[Frame] = []
        left = self._answers.qsize()  # not those that come meanwhile: it would never end
        while answer is not None:
            answers.append(answer)
            answer = self.next_answer() if left else None
            left -= 1
        return answers or None

    def close(self) -> None:
        """The worker has ended: there will be no more answers."""
        self._answers.put(None)

    # -- by the worker

    def receive(self) -> tuple[Any, ...] | None:
        message = self._batches.get()
        received: tuple[Any, ...] | None = None if message is None else unframed(message)
        return received

    def is_waiting(self) -> bool:
        return not self._batches.empty()

    def interrupt(self) -> bool:
        self._batches.put(None)
        return True

    def send_raw(self, message: tuple[Any, ...]) -> None:
        self._answers.put(frame((time.monotonic(), message)))
