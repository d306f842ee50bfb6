"""The user's terminal, handed to a shell elsewhere."""

import asyncio
import os
import signal
import termios
import tty
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress

_INPUT, _OUTPUT = 0, 1
_PIECE_BYTES = 64 * 1024


def is_there() -> bool:
    """Whether this program has a terminal for its input and its output."""
    return os.isatty(_INPUT) and os.isatty(_OUTPUT)


def size() -> tuple[int, int]:
    """Its rows and columns; a terminal that does not know (0) has the usual ones."""
    found = os.get_terminal_size(_OUTPUT)
    return found.lines or 24, found.columns or 80


@contextmanager
def raw() -> Iterator[None]:
    """Every key goes through as it is, Ctrl-C too, until the end of the block."""
    before = termios.tcgetattr(_INPUT)
    tty.setraw(_INPUT, termios.TCSADRAIN)  # what was typed ahead goes through, too
    try:
        yield
    finally:
        termios.tcsetattr(_INPUT, termios.TCSADRAIN, before)


async def keys() -> AsyncGenerator[bytes]:
    """What is typed, until the terminal is closed. What comes while the taker is busy comes in one piece."""
    loop = asyncio.get_running_loop()
    typed = bytearray()
    wake = asyncio.Event()
    closed = False

    def read() -> None:
        nonlocal closed
        data = b""
        with suppress(OSError):
            data = os.read(_INPUT, _PIECE_BYTES)
        if not data:
            closed = True
            loop.remove_reader(_INPUT)
        typed.extend(data)
        if len(typed) > _PIECE_BYTES:
            loop.remove_reader(_INPUT)  # a paste waits until the shell has taken what came before
        wake.set()

    loop.add_reader(_INPUT, read)
    try:
        while not closed or typed:
            await wake.wait()
            wake.clear()
            if typed:
                data = bytes(typed)
                typed.clear()
                yield data
                if not closed:
                    loop.add_reader(_INPUT, read)
    finally:
        loop.remove_reader(_INPUT)


async def show(data: bytes) -> None:
    """Write to it, for as long as that takes: it may be stopped."""

    def write() -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(_OUTPUT, rest) :]

    await asyncio.to_thread(write)


@contextmanager
def on_resize(tell: Callable[[], Awaitable[None]]) -> Iterator[None]:
    """Call ``tell`` whenever its size has changed, one call after the other."""
    changed = asyncio.Event()

    async def follow() -> None:
        while True:
            await changed.wait()
            changed.clear()
            await tell()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGWINCH, changed.set)
    following = asyncio.ensure_future(follow())
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGWINCH)
        following.cancel()
