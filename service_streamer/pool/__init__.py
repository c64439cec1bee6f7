"""One pool for all processes of a user on a host: a process of its own behind a Unix socket."""
