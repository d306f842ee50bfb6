"""The process that runs as PID 1 inside every sandbox: one file, standard library only, Python 3.9 or newer."""
