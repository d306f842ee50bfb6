"""The program ``sandfleet``: quiet from its first moment on."""

import os
import signal

INTERRUPTED = 130
"""Exit code after SIGINT or SIGTERM."""


def main() -> None:
    """Run the command line. A signal before a command takes over ends it at once: there is nothing to clean up yet.

    The imports alone take a third of a second, in which a signal would show as a traceback out of some library.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: os._exit(INTERRUPTED))

    from sandfleet.localstack.cli import app

    app()
