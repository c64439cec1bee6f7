"""Payloads: pickled, or in memory that the web process and a worker share."""
