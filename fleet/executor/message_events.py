"""The two ways in which the SDK streams messages, and the text that a model had written when a run breaks off."""

from typing import Any

from langchain_core.messages import AIMessageChunk, BaseMessage


class MessageEvents:
    """Turns LangGraph's (message, metadata) pairs into events. One per run.

    Mode ``messages-tuple`` passes each pair on as ``messages``. Mode ``messages`` tells each message's metadata once,
    then the text so far with each chunk (``messages/partial``) and whole messages (``messages/complete``).
    """

    def __init__(self, *, pairs: bool, accumulated: bool) -> None:
        self._pairs = pairs
        self._accumulated = accumulated
        self._so_far: dict[str, AIMessageChunk] = {}
        self._unfinished: dict[str, list[str]] = {}
        self._announced: set[str] = set()

    def events(self, message: BaseMessage, metadata: dict[str, Any], namespace: str) -> list[tuple[str, Any]]:
        """The (event name, data) pairs for one pair of LangGraph's; ``namespace`` is empty or ``|node:task``."""
        self._keep_text(message)
        made: list[tuple[str, Any]] = []
        if self._pairs:
            made.append((f"messages{namespace}", [message, metadata]))
        if self._accumulated:
            made += self._accumulate(message, metadata, namespace)
        return made

    def _accumulate(
        self, message: BaseMessage, metadata: dict[str, Any], namespace: str
    ) -> list[tuple[str, Any]]:
        made: list[tuple[str, Any]] = []
        key = message.id or ""
        if key not in self._announced:
            self._announced.add(key)
            made.append((f"messages/metadata{namespace}", {key: {"metadata": metadata}}))
        if isinstance(message, AIMessageChunk):
            before = self._so_far.get(key)
            whole = message if before is None else before + message
            self._so_far[key] = whole
            made.append((f"messages/partial{namespace}", [whole]))
        else:
            made.append((f"messages/complete{namespace}", [message]))
        return made

    def _keep_text(self, message: BaseMessage) -> None:
        if not isinstance(message, AIMessageChunk) or message.id is None:
            return
        if message.chunk_position == "last":
            self._unfinished.pop(message.id, None)
        elif isinstance(message.content, str):
            if message.content:
                self._unfinished.setdefault(message.id, []).append(message.content)
        elif message.text:
            self._unfinished.setdefault(message.id, []).append(message.text)

    def partial(self) -> list[dict[str, str]] | None:
        """Messages that had begun and were not finished, as ``[{"id", "content"}]``; None if there are none."""
        return [{"id": key, "content": "".join(parts)} for key, parts in self._unfinished.items()] or None
