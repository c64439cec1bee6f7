"""When to cut a batch, and of which calls. Decisions only: no I/O, no clocks, no threads."""
