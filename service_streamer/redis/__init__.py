"""Calls and results over Redis, between any number of web servers and worker hosts."""
