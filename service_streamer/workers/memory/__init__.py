"""Payloads: pickled, or in memory shared by the web process and a worker."""
