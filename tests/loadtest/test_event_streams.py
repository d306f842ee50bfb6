"""Server-sent events as the measuring clients take them."""

import pytest

from sandfleet.loadtest.bench.stream import RunStream
from sandfleet.loadtest.recovery.streams import Events

STREAM = (
    b'id: 0-0\r\n\r\nevent: metadata\r\ndata: {"run_id": "r", "attempt": 2}\r\nid: 2-0\r\n\r\n'
    b': heartbeat\r\n\r\nevent: messages\r\ndata: [{"content": "hi"}, {}]\r\n\r\nevent: end\r\ndata: null\r\n\r\n'
)


@pytest.mark.parametrize("cut", range(0, len(STREAM), 7))
async def test_events_are_taken_wherever_their_bytes_are_cut(cut: int) -> None:
    """Red when an event is lost, or taken before it is whole."""
    run, long = RunStream(), Events()
    for stream in (run, long):
        stream.status = 200
        stream.feed(STREAM[:cut], 1.0)
        stream.feed(STREAM[cut:], 2.0)
    assert (run.text, run.terminal_at_s, run.error) == ("hi", 2.0, None)
    assert (list(long.begun_at_s), long.ended_at_s, long.failed, long.path) == ([2], 2.0, False, "r")
