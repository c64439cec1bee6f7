"""Random walks that look for calls that are lost, and for counts that drift.

adapter.py      builds an engine without threads; the one module here that knows the package
world.py        what happens to such an engine, and what must hold after each event
orders.py       all orders of up to six events
engine_walk.py  long random walks on an engine
public_walk.py  random walks through the public API, over threads, processes, pools and Redis
interrupts.py   exceptions as a signal handler raises them
__main__.py     ``make walk``: all of them, for as long as you like
"""
