"""What runs in the interpreter of a measured system; ``yardstick`` starts it."""
