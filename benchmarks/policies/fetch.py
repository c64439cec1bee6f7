"""Fetch whole traces of arrivals, and check them: ``python -m policies.fetch FOLDER``.

Then ``python -m policies --trace FOLDER/BurstGPT_1.csv``. The licences are in ``traces/README.md``.
"""

from __future__ import annotations

import hashlib
import sys
import urllib.request
from pathlib import Path
from typing import NamedTuple

__all__ = ["TRACES", "Trace", "fetch"]

_AZURE = "https://raw.githubusercontent.com/Azure/AzurePublicDataset/b469a113cedca53ddc3bdea71a143dc4b7d8700c/data"
_BURSTGPT = "https://media.githubusercontent.com/media/HPMLL/BurstGPT/5d93d820d9b6bee4e26914df003e5713538164ae/data"
_TIMEOUT = 60  # seconds without a byte
_CHUNK = 1 << 20


class Trace(NamedTuple):
    """A file, where it is, and what it must be."""

    url: str
    sha256: str

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]


TRACES = (
    Trace(
        f"{_AZURE}/AzureLLMInferenceTrace_conv.csv",
        "2f1e5b666d4e3055fdbba98598ce2ec307767b9064e03e2fa46676dbcc7d0bf8",
    ),
    Trace(
        f"{_AZURE}/AzureLLMInferenceTrace_code.csv",
        "54e9a6d2a4bd06ba1e060304b900abbc74cbea53de96506e60fe5bb4f2277fb6",
    ),
    Trace(
        f"{_BURSTGPT}/BurstGPT_1.csv",
        "4bb3783693d0a435686fbfc885615d2349bd067239079fa4b749f2e679e12122",
    ),
)


def fetch(trace: Trace, folder: Path) -> Path:
    """The trace in this folder, fetched unless it is there.

    Raises:
        OSError: it cannot be fetched or written.
        ValueError: it is not the file that it should be; nothing is left of it.
    """
    path = folder / trace.name
    if not path.exists():
        part = path.with_suffix(".part")
        digest = hashlib.sha256()
        with urllib.request.urlopen(trace.url, timeout=_TIMEOUT) as answer, part.open("wb") as file:
            while chunk := answer.read(_CHUNK):
                digest.update(chunk)
                file.write(chunk)
        if digest.hexdigest() != trace.sha256:
            part.unlink()
            raise ValueError(f"{trace.url} has the SHA-256 {digest.hexdigest()}: it has changed")
        part.replace(path)
    return path


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m policies.fetch FOLDER")
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for trace in TRACES:
        try:
            print(fetch(trace, folder))
        except (OSError, ValueError) as error:
            print(f"{trace.name}: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
