"""A package whose name sandfleet uses for one of its own folders."""
