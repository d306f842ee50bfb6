"""What the scripted provider answers: texts, chunks, turns, tool calls, templates."""

import json

import httpx
import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage

from tests.loadtest.served import Served, script, texts
from tests.waiting import eventually


async def test_without_a_script_it_greets_streamed_and_whole_alike(served: Served) -> None:
    streamed = "".join(texts(await served.post("say hi")))
    whole = (await served.post("say hi", stream=False)).json()
    assert streamed == whole["choices"][0]["message"]["content"] == "Hi! How can I help you today?"
    assert whole["choices"][0]["finish_reason"] == "stop"


async def test_text_is_cut_into_chunks_of_the_size_asked_for(served: Served) -> None:
    assert texts(await served.post(script(text="abcdefgh", chunk_chars=3))) == ["abc", "def", "gh"]


async def test_words_are_numbered_so_that_a_gap_would_show(served: Served) -> None:
    answer = "".join(texts(await served.post(script(words=1000, chunk_chars=7))))
    assert answer.split() == [f"w{n}" for n in range(1000)]


async def test_every_answer_has_an_id_of_its_own(served: Served) -> None:
    """Breaks when answers are kept with the id of the first one."""
    ids = {json.loads((await served.post()).text.splitlines()[0][6:])["id"] for _ in range(5)}
    assert len(ids) == 5


async def test_usage_is_sent_when_asked_for(served: Served) -> None:
    answer = await served.post(stream_options={"include_usage": True})
    usage = json.loads(answer.text.splitlines()[-4][6:])["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] > 0


async def test_the_first_chunk_comes_before_the_rest_is_due(served: Served) -> None:
    """Breaks when chunks are gathered into one write: the answer would be complete with its first chunk."""
    async with served.streamed(
        script(text="abcd", chunk_chars=1, chunk_delay_ms=60_000) + " #id:slow"
    ) as answer:
        line = await anext(answer.aiter_lines())
        assert json.loads(line[6:])["choices"][0]["delta"]["content"] == "a"
        assert [a["outcome"] for a in await served.arrivals("slow")] == ["open"]


async def test_a_delayed_answer_is_recorded_on_arrival_and_as_left_by_its_client(served: Served) -> None:
    with pytest.raises(httpx.ReadTimeout):
        await served.http.post(
            "/v1/chat/completions",
            json=served.body(script(text="a", delay_ms=60_000) + " #id:late"),
            timeout=0.2,
        )

    async def closed() -> bool:
        return [a["outcome"] for a in await served.arrivals("late")] == ["client_closed"]

    await eventually(closed)


async def test_the_turn_is_the_number_of_assistant_messages_after_the_last_human_one(served: Served) -> None:
    directive = script(turns=[{"text": "zero"}, {"text": "one"}, {"text": "two"}])
    history = [HumanMessage("before"), AIMessage("not counted"), HumanMessage(directive)]
    answers = []
    for _ in range(4):
        answer = await served.chat().ainvoke(history)
        answers.append(answer.content)
        history.append(answer)
    assert answers == ["zero", "one", "two", "two"], "past its end a script repeats its last turn"


async def test_tool_calls_come_in_pieces_that_langchain_joins(served: Served) -> None:
    calls = [
        {"name": "execute", "args": {"command": "echo 'ä' && ls"}},
        {"name": "read_file", "args": {"path": "a"}},
    ]
    prompt = script(text="I look.", tool_calls=calls, chunk_chars=4)
    pieces = [piece async for piece in served.chat().astream(prompt)]
    assert len([p for p in pieces if p.tool_call_chunks]) > 4
    joined = AIMessageChunk(content="")
    for piece in pieces:
        joined += piece
    assert [(c["name"], c["args"]) for c in joined.tool_calls] == [(c["name"], c["args"]) for c in calls]
    assert len({c["id"] for c in joined.tool_calls}) == 2


async def test_repeated_tool_call_ids_start_at_one_in_every_turn(served: Served) -> None:
    turn = {"tool_calls": [{"name": "f"}, {"name": "g"}]}
    prompt = HumanMessage(script(turns=[turn, turn], repeat_ids=True))
    first = await served.chat().ainvoke([prompt])
    second = await served.chat().ainvoke([prompt, first, ToolMessage("1", tool_call_id="call_1")])
    assert [[c["id"] for c in m.tool_calls] for m in (first, second)] == [["call_1", "call_2"]] * 2


async def test_an_answer_can_quote_the_last_tool_message(served: Served) -> None:
    prompt = HumanMessage(script(turns=[{"tool_calls": [{"name": "f"}]}, {"text": "It said {{last_tool}}!"}]))
    call = await served.chat().ainvoke([prompt])
    tool = ToolMessage("42\n", tool_call_id=call.tool_calls[0]["id"])
    assert (await served.chat().ainvoke([prompt, call, tool])).content == "It said 42!"


@pytest.mark.parametrize(
    ("prompt", "program"),
    [
        ("Which Fibonacci numbers are prime?", "fibonacci_primes.py"),
        ("List the primes below 100", "primes.py"),
        ("Give me pi to 50 digits", "pi.py"),
        ("Do something else", "task.py"),
    ],
)
async def test_the_coder_writes_a_program_that_fits_runs_it_and_quotes_its_output(
    served: Served, prompt: str, program: str
) -> None:
    model = served.chat("scripted-coder")
    history = [HumanMessage(prompt)]
    write = await model.ainvoke(history)
    assert write.tool_calls[0]["name"] == "write_file"
    assert write.tool_calls[0]["args"]["path"] == program
    compile(write.tool_calls[0]["args"]["content"], program, "exec")
    history += [write, ToolMessage("ok", tool_call_id=write.tool_calls[0]["id"])]  # type: ignore[list-item]
    run = await model.ainvoke(history)
    assert run.tool_calls[0]["name"] == "execute"
    assert program in run.tool_calls[0]["args"]["command"]
    report = "exit code: 0\nstdout:\nthe real output"
    history += [run, ToolMessage(report, tool_call_id=run.tool_calls[0]["id"])]  # type: ignore[list-item]
    answer = await model.ainvoke(history)
    assert "the real output" in answer.content
    assert "exit code" not in answer.content
    assert not answer.tool_calls
