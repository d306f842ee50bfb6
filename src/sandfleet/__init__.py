"""sandfleet: durable LangGraph runs and a sandbox per run, on AWS and on a laptop.

The packages below this one are links to the folders at the top of the repository, so that a user's
own ``shared`` or ``functions`` package never meets ours.
"""

__version__ = "0.1.0"
