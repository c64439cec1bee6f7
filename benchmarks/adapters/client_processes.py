"""Client processes that are asked to call a pool or a service; see ``sharing_client``."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

__all__ = ["PATIENCE", "Client", "asked", "clients"]

#: Seconds that every answer may take after the last fault.
PATIENCE = 60.0


class Client:
    """One process.

    Args:
        spec: what it calls; see ``sharing_client``.
        env: None for that of this process.
    """

    def __init__(self, spec: Mapping[str, Any], env: Mapping[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "adapters.sharing_client", json.dumps(spec)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env,
        )  # fmt: skip

    def ask(self, **question: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        """Raises ValueError: it has ended."""
        assert self.process.stdout is not None
        said: dict[str, Any] = json.loads(self.process.stdout.readline())
        return said

    def end(self) -> None:
        with contextlib.suppress(BrokenPipeError), self.process:
            self.ask(end=True)
            assert self.process.stdin is not None
            self.process.stdin.close()
            self.process.wait(PATIENCE)


@contextlib.contextmanager
def clients(
    count: int, spec: Mapping[str, Any], env: Mapping[str, str] | None = None
) -> Iterator[list[Client]]:
    """Processes that are ready. Those that the list has at the end are ended."""
    started = [Client(spec, env) for _ in range(count)]
    try:
        for client in started:
            client.hear()
        yield started
        for client in started:
            client.end()
    finally:
        for client in started:
            client.process.kill()
            client.process.wait()


def asked(of: Sequence[Client], **question: Any) -> list[dict[str, Any]]:
    """The answers of all, which are asked at the same time."""
    for client in of:
        client.ask(**question)
    return [client.hear() for client in of]
