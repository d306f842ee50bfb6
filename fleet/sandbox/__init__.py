"""The executor's side of sandboxes: the client of the sandbox host, the sandbox of one run, and tools for graphs."""
