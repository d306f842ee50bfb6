"""What `sandfleet run` and `sandfleet demo` print, without colour, and what they notice."""

import io
from typing import Any

import pytest
from rich.console import Console

from sandfleet.localstack.event_printer import EventPrinter

STREAM: list[tuple[str, Any]] = [
    ("metadata", {"run_id": "r1", "attempt": 1}),
    ("messages", [{"type": "AIMessageChunk", "id": "m1", "content": "I will "}, {}]),
    ("messages", [{"type": "AIMessageChunk", "id": "m1", "content": "run it."}, {}]),
    ("tools", {"event": "tool-started", "tool_call_id": "c1", "tool_name": "execute", "input": {"command": "ls [x]"}}),
    ("tools", {"event": "tool-finished", "tool_call_id": "c1", "output": {"content": "a.py\nb.py"}}),
    ("updates", {"tools": {"messages": []}}),
    ("messages", [{"type": "AIMessageChunk", "id": "m2", "content": [{"type": "text", "text": "Two files."}]}, {}]),
    ("end", None),
]  # fmt: skip


@pytest.fixture
def printer() -> EventPrinter:
    return EventPrinter(Console(file=io.StringIO(), width=200, soft_wrap=True, highlight=False))


def printed(printer: EventPrinter) -> str:
    file = printer.console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_a_stream_reads_well_without_colour(printer: EventPrinter) -> None:
    """Each line begins with what it is. Breaks if text of users is taken for markup."""
    for event, data in STREAM:
        printer.feed(event, data)
    printer.close()
    assert printed(printer).splitlines() == [
        "run      r1",
        "model    I will run it.",
        'tool     execute {"command": "ls [x]"}',
        "result   a.py",
        "result   b.py",
        "step     tools",
        "model    Two files.",
    ]


def test_what_a_model_said_is_shown_without_its_deltas(printer: EventPrinter) -> None:
    """As `sandfleet watch` gets a run of yesterday. Breaks if only deltas are printed: the answer is missing then."""
    said = {"type": "ai", "id": "m1", "content": "Two [files]."}
    printer.feed("updates", {"model": {"messages": [said]}})
    printer.feed("updates", {"tools": {"messages": [{"type": "tool", "content": "a.py"}]}, "count": 7})
    assert printed(printer).splitlines() == [
        "model    Two [files].",
        "step     model",
        "step     tools, count",
    ]
    assert printer.answer == "Two [files]."


def test_what_was_streamed_is_not_shown_again(printer: EventPrinter) -> None:
    """Breaks if a step's result is printed after the deltas that it was put together from."""
    printer.feed("messages", [{"type": "AIMessageChunk", "id": "m1", "content": "Two."}, {}])
    printer.feed("updates", {"model": {"messages": [{"type": "ai", "id": "m1", "content": "Two."}]}})
    assert printed(printer).splitlines() == ["model    Two.", "step     model"]


def test_the_answer_is_the_last_message(printer: EventPrinter) -> None:
    """Breaks if the text of earlier messages is kept."""
    for event, data in STREAM:
        printer.feed(event, data)
    assert printer.answer == "Two files."


def test_a_tool_call_without_an_end_is_missing(printer: EventPrinter) -> None:
    """`sandfleet demo` fails then. Breaks if `missing` looks at anything but the ids."""
    for event, data in STREAM:
        if not (isinstance(data, dict) and data.get("event") == "tool-finished"):
            printer.feed(event, data)
    assert printer.missing() == ["c1"]


def test_an_error_of_the_run_is_kept(printer: EventPrinter) -> None:
    """Breaks if `error` events are only printed."""
    printer.feed("error", {"error": "ValueError", "message": "no"})
    assert printer.error == "ValueError: no"
    assert "ValueError: no" in printed(printer)
