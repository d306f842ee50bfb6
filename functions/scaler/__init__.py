"""As many executors as runs wait for."""
