"""How many executors a pool should have: the reading, the decision and its settings."""
