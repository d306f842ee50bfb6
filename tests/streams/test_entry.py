"""Cursors that clients send, and what an entry holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandfleet.shared.streams.entry import START, EventId, decode, encode, parse_cursor


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "0",
        "-1",
        "0-0",
        "0-7",
        "7",
        "abc",
        "3-",
        "-3-1",
        "3-1-1",
        " 3-1",
        "3-1\n",
        "٣-١",
        "1.0-2",
        "0x1-2",
    ],
)
def test_what_is_no_id_means_everything(text: str | None) -> None:
    """Broken by raising, or by taking `int()`'s idea of a number."""
    assert parse_cursor(text) == START


@given(st.integers(1, 2**31 - 1), st.integers(0, 2**31 - 1))
def test_an_id_survives_the_way_to_the_client_and_back(attempt: int, seq: int) -> None:
    assert parse_cursor(str(EventId(attempt, seq))) == (attempt, seq)


def test_a_cursor_beyond_all_numbers_stays_within_what_postgresql_holds() -> None:
    """Broken by not clamping: PostgreSQL refuses the number, and the client gets no stream."""
    assert parse_cursor(f"{10**19}-{10**19}") == (2**31 - 1, 2**31 - 1)


@given(st.text())
def test_any_text_is_a_cursor(text: str) -> None:
    assert parse_cursor(text) >= START


@given(
    st.integers(1, 2**31 - 1),
    st.lists(st.tuples(st.integers(0, 2**31 - 1), st.text(), st.text())),
)
def test_an_entry_holds_its_events_exactly(attempt: int, events: list[tuple[int, str, str]]) -> None:
    """U+0000 and line breaks included. Lone surrogates cannot be in UTF-8, so they cannot get here."""
    payload = encode([(seq, name, data.encode()) for seq, name, data in events])
    assert decode(b"%d-5" % attempt, payload) == [((attempt, seq), name, data) for seq, name, data in events]
