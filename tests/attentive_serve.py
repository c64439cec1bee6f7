"""The command line of a service that looks at files of certificates and keys all the time."""

from __future__ import annotations

from service_streamer.serve import running
from service_streamer.serve.cli.main import main

running._LOOK = 0.05  # here: web processes import this file, too

if __name__ == "__main__":
    main()
