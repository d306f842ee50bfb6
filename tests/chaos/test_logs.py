"""The verdict on a stream: what it must call wrong."""

import pytest

from tests.chaos.followers import Seen
from tests.chaos.logs import Journalled, stream_problems

JOURNAL = [
    Journalled(1, 0, "metadata", "{}"),
    Journalled(1, 2, "updates", "1"),
    Journalled(2, 0, "metadata", "{}"),
    Journalled(2, 1, "end", "null"),
]
SEEN = [
    Seen("1-0", "metadata", "{}"),
    Seen("1-1", "values", "{}"),
    Seen("1-2", "updates", "1"),
    Seen("2-0", "metadata", "{}"),
    Seen("2-1", "end", "null"),
]


def test_a_stream_that_is_the_log_is_right():
    assert stream_problems(JOURNAL, SEEN) == []


@pytest.mark.parametrize("missing", [0, 2, 3, 4])
def test_a_journalled_event_that_is_missing_is_wrong(missing):
    assert stream_problems(JOURNAL, SEEN[:missing] + SEEN[missing + 1 :])


def test_a_token_that_is_missing_must_be_announced_on_the_same_connection():
    before, after = SEEN[:1], [event._replace(connection=2) for event in SEEN[2:]]
    resync = Seen("", "resync", "{}")
    assert stream_problems(JOURNAL, before + after)
    assert stream_problems(JOURNAL, [*before, resync, *after])
    assert stream_problems(JOURNAL, [*before, resync._replace(connection=2), *after]) == []


def test_an_event_that_is_seen_twice_is_wrong():
    for event in SEEN:
        at = SEEN.index(event)
        assert stream_problems(JOURNAL, [*SEEN[:at], event, *SEEN[at:]]), event


def test_an_event_of_a_superseded_attempt_after_the_successors_first_is_wrong():
    assert stream_problems(JOURNAL, [*SEEN[:4], Seen("1-3", "updates", "late"), SEEN[4]])


def test_an_event_with_other_data_than_the_journals_is_wrong():
    assert stream_problems(JOURNAL, [*SEEN[:2], SEEN[2]._replace(data="2"), *SEEN[3:]])


def test_a_stream_that_does_not_end_is_wrong_also_when_its_run_was_undone():
    assert stream_problems(JOURNAL, SEEN[:4])
    assert stream_problems(None, SEEN[:3])
    assert stream_problems(None, [*SEEN[:3], Seen("", "end", "null")]) == []
