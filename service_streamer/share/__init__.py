"""Identical items are computed once; results are kept for later callers."""
