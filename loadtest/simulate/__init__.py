"""A fleet in discrete events, to compare policies of scaling: how long runs wait, and what the executors cost."""
