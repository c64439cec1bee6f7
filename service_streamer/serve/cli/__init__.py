"""The command line: ``service-streamer serve``, ``worker``, ``simulate`` and ``info``."""
