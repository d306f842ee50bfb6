"""The sandbox host: the daemon that owns the Docker Engine of a machine and the sandboxes on it."""
