"""Decisions without I/O, clocks or threads: tables and events in, actions out."""
