"""Reading server-sent events, and of a run: when the first token came, the whole text, how it ended."""

from abc import ABC, abstractmethod

import orjson

from sandfleet.loadtest.bench.http import Exchange


class EventStream(Exchange, ABC):
    """An answer whose body is server-sent events; derived classes take each by `dispatch`. Other answers keep their body."""

    def __init__(self) -> None:
        super().__init__()
        self._rest = b""
        self._event = b""
        self._data = b""

    @abstractmethod
    def dispatch(self, event: bytes, data: bytes, at_s: float) -> None:
        """Take an event, whose end was read at ``at_s``."""

    def feed(self, data: bytes, at_s: float) -> None:
        if self.status != 200:
            super().feed(data, at_s)
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for raw in lines:
            line = raw.rstrip(b"\r")
            if line.startswith(b"data: "):
                self._data += line[6:]
            elif line.startswith(b"event: "):
                self._event = line[7:]
            elif not line and self._event:
                self.dispatch(self._event, self._data, at_s)
                self._event = self._data = b""


class RunStream(EventStream):
    """The answer to ``POST …/runs/stream`` with ``stream_mode: ["messages-tuple"]``.

    ``first_token_at_s`` is when the first event with text was read, ``terminal_at_s`` when ``end`` was, or the end of
    the body for servers that send none. Both are 0 if it did not come.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first_token_at_s = 0.0
        self.text = ""
        self.error: str | None = None
        self._ended_at_s = 0.0

    @property
    def terminal_at_s(self) -> float:
        """When the run was over for its client."""
        return self._ended_at_s or self.end_at_s

    def dispatch(self, event: bytes, data: bytes, at_s: float) -> None:
        if event == b"messages":
            content = orjson.loads(data)[0].get("content")
            if isinstance(content, str) and content:
                self.first_token_at_s = self.first_token_at_s or at_s
                self.text += content
        elif event == b"error":
            self.error = data.decode(errors="replace")[:300]
        elif event == b"end":
            self._ended_at_s = at_s
