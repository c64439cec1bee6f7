"""Which workers to start, restart, quarantine or kill. Decisions only: no I/O, no clocks."""
