"""Accelerators: which there are, which of them a worker sees, and what a worker does on them."""
