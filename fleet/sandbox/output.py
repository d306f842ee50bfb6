"""What sandboxes print, as text that streams, states and PostgreSQL can hold."""

import codecs
from collections.abc import Callable
from typing import Any


class Streamed:
    """Hands a command's output on while it runs, as text, with characters that were cut between pieces kept whole."""

    def __init__(self, emit: Callable[[Any], None]) -> None:
        """``emit`` gets ``{"stream": "stdout" or "stderr", "text": …}``."""
        self._emit = emit
        self._decoders = {
            name: codecs.getincrementaldecoder("utf-8")("replace") for name in ("stdout", "stderr")
        }

    def __call__(self, stream: str, data: bytes) -> None:
        if text := storable(self._decoders[stream].decode(data)):
            self._emit({"stream": stream, "text": text})


def storable(text: str) -> str:
    """Text without what PostgreSQL or JSON cannot hold: U+0000 and lone surrogates become U+FFFD."""
    return text.replace("\0", "\ufffd").encode("utf-16", "surrogatepass").decode("utf-16", "replace")
