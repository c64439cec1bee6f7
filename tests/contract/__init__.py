"""What streamers of every kind do for their callers.

The test modules of each kind have subclasses of these classes, whose fixtures say how to build one.
"""
