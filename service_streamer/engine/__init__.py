"""Accepts calls in any thread, hands batches to workers, and answers each call exactly once."""
