"""Runs that call a model: the scripted provider over real HTTP."""

import itertools
import json

import pytest

HI = "say hi"


def asking(prompt, **script):
    """Input for a chat; ``script`` is what the provider shall do with it."""
    directive = f" #script:{json.dumps(script)}" if script else ""
    return {"messages": [{"role": "user", "content": prompt + directive}]}


async def test_tokens_are_streamed_as_they_come(client):
    """Red when messages-tuple gives the whole message at once, or not at all."""
    given = asking(HI, turns=[{"text": "one two three four", "chunk_chars": 4}])
    parts = [
        e.data[0]["content"]
        async for e in client.runs.stream(None, "messages", input=given, stream_mode="messages-tuple")
        if e.event == "messages"
    ]
    assert "".join(parts) == "one two three four"
    assert len([p for p in parts if p]) > 1


async def test_accumulated_messages_grow_to_the_whole(client):
    """Red when mode `messages` does not gather chunks."""
    given = asking(HI, turns=[{"text": "one two three", "chunk_chars": 3}])
    events = [e async for e in client.runs.stream(None, "messages", input=given, stream_mode="messages")]
    partial = [e.data[0]["content"] for e in events if e.event == "messages/partial"]
    assert partial[-1] == "one two three"
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(partial))


@pytest.mark.parametrize("fault", [{"status": 429, "retry_after_s": 0.01}, {"status": 500}, {"drop": True}])
async def test_a_model_that_fails_once_is_asked_again(client, fault):
    """Red when the examples' model does not retry."""
    given = asking(HI, turns=[{"text": "hello", "faults": [{**fault, "times": 1}]}])
    values = await client.runs.wait(None, "messages", input=given)
    assert values["messages"][-1]["content"] == "hello"


async def test_a_model_that_refuses_is_the_graphs_error(client):
    """Red when an error of the model looks like one of ours."""
    given = asking(
        HI, turns=[{"text": "x", "faults": [{"status": 400, "message": "bad prompt", "times": None}]}]
    )
    answer = await client.runs.wait(None, "messages", input=given, raise_error=False)
    assert answer["__error__"]["error"].endswith("RequestError")
    assert "bad prompt" in answer["__error__"]["message"]


async def test_text_that_was_written_before_an_error_is_kept(client, query):
    """Red when the partial text is dropped with the failed turn."""
    thread = await client.threads.create()
    given = asking(
        HI,
        turns=[
            {
                "text": "never to be finished",
                "chunk_chars": 5,
                "faults": [{"drop": True, "after_chunks": 2, "times": None}],
            }
        ],
    )
    events = []
    async for event in client.runs.stream(
        thread["thread_id"], "messages", input=given, stream_mode="messages-tuple"
    ):
        events.append(event.event)
    assert events[-2:] == ["error", "end"]
    ((partial,),) = await query("select partial from runs where thread_id = %s", thread["thread_id"])
    assert partial[0]["content"].startswith("never")
