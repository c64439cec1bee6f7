"""Every option: its type, its range, its default. Bad values are refused at once, by name."""
