"""A client of a run's stream: what it sees, and that it always ends."""

import json

from tests.streams.world import World


async def test_events_arrive_in_order_with_contiguous_ids_up_to_end(world: World) -> None:
    """A run's whole stream, watched live: `metadata` first, `end` last, one id per event."""
    key = await world.run()
    client = world.follow(key, fresh=True)
    stream = await world.claim(key)
    for n in range(5):
        stream.emit("messages", b"%d" % n, journalled=False)
        stream.emit("updates", b"%d" % n, journalled=True)
    await world.finish(stream)
    events = await client.end()
    assert [e.id for e in events] == [f"1-{n}" for n in range(12)]
    assert [e.event for e in events] == ["metadata", *["messages", "updates"] * 5, "end"]
    assert json.loads(events[0].data) == {"run_id": str(key.run_id), "attempt": 1, "checkpoint_id": None}
    assert events[-1].data == "null"
