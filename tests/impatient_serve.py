"""The command line of a service for which every signal to end is a wish of its own."""

from __future__ import annotations

import functools

import service_streamer.serve.launching as launching
from service_streamer.serve.cli.main import main

if __name__ == "__main__":  # workers import this file, too
    launching.launch = functools.partial(launching.launch, same_signal=0.0)
    main()
