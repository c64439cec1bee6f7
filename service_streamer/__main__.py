"""``python -m service_streamer``: the command line."""

from __future__ import annotations

from .serve.cli.main import main

if __name__ == "__main__":
    main()
