"""What a graph emits always becomes JSON; what a client sends is read exactly or refused."""

import dataclasses
import datetime
import decimal
import enum
import json
import uuid
from collections import OrderedDict, deque
from types import MappingProxyType
from typing import Any, NamedTuple

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, AIMessageChunk, ToolMessage
from langgraph.types import Interrupt
from pydantic import BaseModel, SecretStr

from sandfleet.shared.errors import BadRequest, InvalidRequest
from sandfleet.shared.json_text import contains, parse_json, to_json

DEPTH = 200


class Color(enum.Enum):
    RED = "red"


class Point(NamedTuple):
    x: int
    y: object


@dataclasses.dataclass
class Box:
    name: str
    inside: Any = None


class Form(BaseModel):
    title: str
    boxes: list[Any] = []


class Angry:
    """Raises whenever it is looked at."""

    def __repr__(self) -> str:
        raise RuntimeError("no")

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("no")


class Dumpless(BaseModel):
    def model_dump(self, **_: Any) -> dict[str, Any]:
        raise RuntimeError("no")


any_text = st.text(st.characters(codec=None))  # lone surrogates and U+0000 included
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**200), 2**200)
    | st.floats()
    | any_text
    | st.binary()
    | st.datetimes()
    | st.timedeltas()
    | st.uuids()
    | st.decimals()
    | st.complex_numbers()
    | st.sampled_from([Color.RED, object(), Dumpless(), ValueError("a\ud800"), Color, int, SecretStr("s")])
    | st.builds(Angry)
)
keys = (
    any_text
    | st.integers()
    | st.none()
    | st.booleans()
    | st.tuples(st.integers(), any_text)
    | st.just(Color.RED)
)
anything = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(keys, inner)
        | st.frozensets(st.integers() | any_text)
        | st.tuples(inner, inner)
        | st.builds(Box, any_text, inner)
        | st.builds(Point, st.integers(), inner)
        | st.builds(lambda boxes: Form(title="t", boxes=boxes), st.lists(inner))
        | st.builds(lambda value: Interrupt(value, id="i"), inner)
        | st.builds(deque, st.lists(inner))
    ),
    max_leaves=20,
)
plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=30,
)


@settings(deadline=None)  # a loaded machine is slow
@given(anything)
def test_whatever_a_graph_emits_becomes_json(value: object) -> None:
    """Breaks without the second, mending pass: most examples have something that orjson refuses."""
    orjson.loads(to_json(value))


@given(plain)
def test_plain_json_survives_exactly(value: object) -> None:
    """U+0000 included. Breaks if the text is cleaned on the way out."""
    assert orjson.loads(to_json(value)) == value
    assert parse_json(to_json(value), DEPTH) == value


@given(plain)
def test_the_mending_pass_changes_nothing_that_needs_none(value: object) -> None:
    """One lone surrogate sends the whole value through the slow pass; its neighbours come out as from the fast one."""
    assert orjson.loads(to_json([value, "\ud800"])) == [value, "\ufffd"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (float("nan"), None),
        (float("-inf"), None),
        (2**64, float(2**64)),
        (-(2**63) - 1, float(-(2**63))),
        ("a\ud800b", "a\ufffdb"),
        ("\ud83d\ude00", "😀"),
        ("a\0b", "a\0b"),
        (b"\x00\xff", "AP8="),
        ({2: "a", None: "b", True: "c"}, {"2": "a", "null": "b", "true": "c"}),
        ({(1, 2): "a"}, {"(1, 2)": "a"}),
        ({Color.RED: Color.RED}, {"red": "red"}),
        ((1, {2}), [1, [2]]),
        (Point(1, Box("b")), {"x": 1, "y": {"name": "b", "inside": None}}),
        (
            Form(title="t", boxes=[Box("b", 2**70)]),
            {"title": "t", "boxes": [{"name": "b", "inside": 2.0**70}]},
        ),
        (MappingProxyType({"a": 1}), {"a": 1}),
        (OrderedDict(a=1), {"a": 1}),
        (uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC), "2026-01-02T00:00:00+00:00"),
        (datetime.time(1, 2, tzinfo=datetime.UTC), "01:02:00+00:00"),
        (datetime.timedelta(minutes=1.5), 90.0),
        (decimal.Decimal("1.5"), 1.5),
        (decimal.Decimal(3), 3),
        (ValueError("why"), {"error": "ValueError", "message": "why"}),
        (Interrupt("?", id="i"), {"value": "?", "id": "i", "response_schema": None}),
        (SecretStr("hidden"), "SecretStr('**********')"),
    ],
)
def test_forms(value: object, expected: object) -> None:
    """Each kind of value in the form that LangGraph's API gives it."""
    assert orjson.loads(to_json(value)) == expected


def test_messages_have_all_their_fields() -> None:
    """Clients tell messages apart by `type`. Breaks if messages are written as unknown objects."""
    message = AIMessage("hi", id="m", tool_calls=[{"name": "t", "args": {"n": 2**70}, "id": "call_1"}])
    written = orjson.loads(to_json({"messages": [message, ToolMessage("r", tool_call_id="call_1")]}))[
        "messages"
    ]
    assert [m["type"] for m in written] == ["ai", "tool"]
    assert written[0]["content"] == "hi"
    assert written[0]["tool_calls"][0]["args"] == {"n": 2.0**70}
    assert orjson.loads(to_json(AIMessageChunk(content="part")))["type"] == "AIMessageChunk"


def test_what_contains_itself_is_cut_off() -> None:
    """Breaks without the set of what is being written: the branches would double at each level."""
    loop: dict[str, Any] = {"a": 1}
    loop["left"] = loop["right"] = loop
    written = orjson.loads(to_json(loop))
    assert written["a"] == 1
    assert isinstance(written["left"], str)


def test_what_nests_too_deeply_is_cut_off() -> None:
    """Breaks without the bound: orjson refuses more than 254 levels and Python's stack ends near 1,000."""
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    written, levels = orjson.loads(to_json({"deep": deep, "beside": 1})), 0
    assert written["beside"] == 1
    inner = written["deep"]
    while isinstance(inner, list):
        inner, levels = inner[0], levels + 1
    assert levels == DEPTH - 1
    assert len(inner) <= 1000


def test_unknown_objects_are_bounded_texts() -> None:
    """Breaks without the bound: a data frame's text would go to every client."""

    class Huge:
        def __repr__(self) -> str:
            return "x" * 1_000_000

    assert len(orjson.loads(to_json(Huge()))) <= 1000
    assert orjson.loads(to_json([Angry()]))[0].startswith("<Angry instance")


# --- requests ------------------------------------------------------------------------------------------------------


@given(plain)
def test_any_json_is_read_as_json_reads_it(value: object) -> None:
    """Also with other spacing and with everything escaped."""
    assert parse_json(json.dumps(value, indent=1).encode(), DEPTH) == value


@given(st.binary())
def test_bytes_are_read_or_refused(body: bytes) -> None:
    """No other error may reach the caller: it would be a 500."""
    try:
        parse_json(body, DEPTH)
    except (InvalidRequest, BadRequest):
        pass


@pytest.mark.parametrize(
    ("body", "where"),
    [
        (b"", "zero-length"),
        (b'{"a": NaN}', "char 6"),
        (b'{"a": 1e999}', "char 6"),
        (b'{"a":\n -Infinity}', "line 2"),
        (rb'{"a": "\ud800"}', "char 7"),
        (b'{"a": "\xff"}', "byte 7"),
        (b'{"a": 1', "char"),
        (b'{"a": 1}{', "char 8"),
    ],
)
def test_what_cannot_be_kept_is_refused_with_its_place(body: bytes, where: str) -> None:
    """Breaks with the standard library's parser: it takes NaN and lone surrogates, and makes 1e999 infinite."""
    with pytest.raises(InvalidRequest, match=where) as caught:
        parse_json(body, DEPTH)
    assert caught.value.status == 422


def test_integers_beyond_64_bits_become_floats() -> None:
    """As in the reference server; 64 bits themselves are exact."""
    assert parse_json(b"[18446744073709551615, 18446744073709551616]", DEPTH) == [2**64 - 1, 2.0**64]


@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}")])
@pytest.mark.parametrize("levels", [DEPTH + 1, 2_000, 1_000_000])
def test_deep_nesting_is_a_bad_request(opening: bytes, closing: bytes, levels: int) -> None:
    """Breaks without the count of levels: orjson itself takes 1,024."""
    assert parse_json(opening * DEPTH + b"1" + closing * DEPTH, DEPTH)
    with pytest.raises(BadRequest, match="200 levels") as caught:
        parse_json(opening * levels + b"1" + closing * levels, DEPTH)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ({}, True),
        ({"a": 1}, True),
        ({"a": 2}, False),
        ({"a": True}, False),
        ({"b": {"c": "x"}}, True),
        ({"b": {"c": "x", "e": 1}}, False),
        ({"l": [3]}, True),
        ({"l": [3, 4]}, False),
        ({"missing": None}, False),
        ({"n": None}, True),
    ],
)
def test_containment(wanted: dict[str, Any], found: bool) -> None:
    """As PostgreSQL's `@>`, which cannot be asked because it refuses U+0000."""
    document = {"a": 1, "b": {"c": "x", "d": 0}, "l": [1, 2, 3], "n": None, "nul": "\0"}
    assert contains(document, wanted) is found
