"""Prints the events of a run as they stream, and keeps count of what a complete stream must contain."""

import json
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.markup import escape

_ARGUMENT_CHARS = 400
_RESULT_LINES = 12
_OF_A_MODEL = ("ai", "AIMessageChunk", "AIMessage")


@dataclass
class EventPrinter:
    """Feed it every event of one run.

    After the stream ``answer`` is the text of the last message of the model, ``started`` and ``finished`` are the ids
    of tool calls that began and ended, ``error`` is what the run failed with, and ``paused`` whether it waits for an answer.
    """

    console: Console
    answer: str = ""
    error: str | None = None
    paused: bool = False
    events: int = 0
    started: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    _message_id: str | None = None
    _mid_line: bool = False

    def feed(self, event: str, data: Any) -> None:
        """Print one event. Unknown ones are counted only."""
        self.events += 1
        name = event.split("|", 1)[0]
        if name == "messages" and isinstance(data, list) and data:
            self._message(data[0])
        elif name == "tools" and isinstance(data, dict):
            self._tool(data)
        elif name == "updates" and isinstance(data, dict):
            self._update(data)
        elif name == "error":
            detail = data if isinstance(data, dict) else {"message": data}
            self.error = f"{detail.get('error', 'error')}: {detail.get('message', '')}"
            self._line(f"[bold red]error[/]    {escape(self.error)}")
        elif name == "metadata" and isinstance(data, dict):
            self._line(f"[dim]run      {escape(str(data.get('run_id', '')))}[/]")

    def missing(self) -> list[str]:
        """Ids of tool calls that began and never ended."""
        return sorted(set(self.started) - set(self.finished))

    def close(self) -> None:
        """End an unfinished line."""
        if self._mid_line:
            self.console.print()
            self._mid_line = False

    def _message(self, message: dict[str, Any]) -> None:
        if message.get("type") not in _OF_A_MODEL:
            return
        text = _text(message.get("content"))
        if not text:
            return
        if message.get("id") != self._message_id:
            self._message_id = message.get("id")
            self.answer = ""
            self.close()
            self.console.print("[bold]model    [/]", end="")
        self.answer += text
        self._mid_line = True
        self.console.out(text, end="", highlight=False)

    def _tool(self, data: dict[str, Any]) -> None:
        call, kind = str(data.get("tool_call_id")), data.get("event")
        name = str(data.get("tool_name") or data.get("name") or "tool")
        if kind == "tool-started":
            self.started.append(call)
            self._line(f"[bold cyan]tool[/]     {escape(name)} {escape(_arguments(data.get('input')))}")
        elif kind in ("tool-finished", "tool-error"):
            self.finished.append(call)
            text = str(data.get("message")) if kind == "tool-error" else _text(_content(data.get("output")))
            lines = text.splitlines() or ["(no output)"]
            colour = "red" if kind == "tool-error" else "green"
            for line in lines[:_RESULT_LINES]:
                self._line(f"[{colour}]result[/]   {escape(line)}")
            if len(lines) > _RESULT_LINES:
                self._line(f"[{colour}]result[/]   … {len(lines) - _RESULT_LINES} more lines")
        elif kind == "tool-output-delta":
            for line in _text(data.get("delta")).splitlines():
                self._line(f"[dim]output   {escape(line)}[/]")

    def _update(self, data: dict[str, Any]) -> None:
        if "__interrupt__" in data:
            self.paused = True
            self._line(f"[bold yellow]paused[/]   {escape(json.dumps(data['__interrupt__'], default=str))}")
            return
        # Of a run that ended long ago what was streamed is gone, and its results are there.
        if self._message_id is None:
            for answer in _answers(data):
                self.answer = answer
                self._line(f"[bold]model    [/]{escape(answer)}")
        self._line(f"[dim]step     {escape(', '.join(data))}[/]")

    def _line(self, text: str) -> None:
        self.close()
        self.console.print(text)


def _answers(update: dict[str, Any]) -> list[str]:
    """What models said in the messages that nodes have returned."""
    found = []
    for returned in update.values():
        messages = returned.get("messages") if isinstance(returned, dict) else None
        for message in messages if isinstance(messages, list) else ():
            if isinstance(message, dict) and message.get("type") in _OF_A_MODEL:
                found.append(_text(message.get("content")))
    return [text for text in found if text]


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(part.get("text", "") if isinstance(part, dict) else str(part) for part in content)
    if isinstance(content, dict):
        return str(content.get("text", ""))
    return "" if content is None else str(content)


def _content(output: Any) -> Any:
    if isinstance(output, dict):
        return output.get("content", output.get("kwargs", {}).get("content", json.dumps(output, default=str)))
    return output


def _arguments(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= _ARGUMENT_CHARS else text[:_ARGUMENT_CHARS] + " …"
