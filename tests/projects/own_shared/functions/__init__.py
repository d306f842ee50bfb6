"""Another package with the name of one of sandfleet's folders."""

from shared.greeting import greeting


def shout(name: str) -> str:
    """The greeting in capitals."""
    return greeting(name).upper()
