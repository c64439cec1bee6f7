"""The command line of a service for which every signal to end is a wish of its own."""

from __future__ import annotations

import functools

import service_streamer.serve.cli.main as cli

if __name__ == "__main__":  # workers import this file, too
    cli.run_service = functools.partial(cli.run_service, same_signal=0.0)
    cli.main()
