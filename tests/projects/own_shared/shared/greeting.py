"""What the project's graph shares."""

import os


def greeting(name: str) -> str:
    """The greeting of the environment file, for ``name``."""
    return f"{os.environ['OWN_SHARED_GREETING']}, {name}"
