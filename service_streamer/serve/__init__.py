"""The web service in one command: the command line, and what it runs."""
