"""How the scripted provider fails: error statuses, rate limits, dropped connections, silence, bad scripts."""

import httpx
import openai
import pytest

from tests.loadtest.served import Served, script, texts
from tests.waiting import eventually


def faulty(*faults: dict[str, object], **more: object) -> str:
    return script(text="abcdefgh", chunk_chars=2, faults=faults, **more)


async def test_a_status_is_answered_as_often_as_asked_and_then_the_answer(served: Served) -> None:
    prompt = faulty({"status": 500, "times": 2})
    answers = [await served.post(prompt) for _ in range(3)]
    assert [a.status_code for a in answers] == [500, 500, 200]
    assert answers[0].json()["error"]["type"] == "server_error"
    assert "".join(texts(answers[2])) == "abcdefgh"


async def test_after_its_answer_a_faulty_script_starts_anew(served: Served) -> None:
    """Breaks when the count of faults outlives the answer: the next run of the same prompt would see none."""
    statuses = [(await served.post(faulty({"status": 503}))).status_code for _ in range(4)]
    assert statuses == [503, 200, 503, 200]


async def test_faults_are_counted_per_correlation_id(served: Served) -> None:
    prompt = faulty({"status": 500})
    assert [(await served.post(f"{prompt} #id:{run}")).status_code for run in "abab"] == [500, 500, 200, 200]


async def test_without_times_a_fault_never_ends(served: Served) -> None:
    prompt = faulty({"status": 400, "times": None})
    assert {(await served.post(prompt)).status_code for _ in range(5)} == {400}


async def test_a_rate_limit_says_when_to_come_back(served: Served) -> None:
    answer = await served.post(faulty({"status": 429, "retry_after_s": 7}))
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "7"
    assert answer.json()["error"]["type"] == "rate_limit_error"


async def test_langchain_retries_rate_limits_errors_and_lost_connections(served: Served) -> None:
    quick = {"retry_after_s": 0.01}
    prompt = faulty({"status": 429, **quick}, {"status": 500, **quick}, {"drop": True})
    answer = await served.chat(max_retries=3).ainvoke(f"{prompt} #id:retried")
    assert answer.content == "abcdefgh"
    outcomes = [a["outcome"] for a in await served.arrivals("retried")]
    assert outcomes == ["status 429", "status 500", "dropped", "answered"]


async def test_langchain_does_not_retry_a_bad_request(served: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="as scripted"):
        await served.chat(max_retries=3).ainvoke(
            faulty({"status": 400, "message": "as scripted"}) + " #id:bad"
        )
    assert len(await served.arrivals("bad")) == 1


async def test_a_connection_can_be_dropped_before_the_answer(served: Served) -> None:
    with pytest.raises(httpx.RemoteProtocolError):
        await served.post(faulty({"drop": True}))


async def test_a_connection_can_be_dropped_in_mid_stream(served: Served) -> None:
    lines = []

    async def read() -> None:
        async with served.streamed(faulty({"drop": True, "after_chunks": 3})) as answer:
            async for line in answer.aiter_lines():
                lines.append(line)

    with pytest.raises(httpx.RemoteProtocolError):
        await read()
    assert len([line for line in lines if line]) == 3


async def test_an_error_can_come_inside_the_stream(served: Served) -> None:
    with pytest.raises(openai.APIError, match="overloaded"):
        await served.chat().ainvoke(faulty({"status": 503, "message": "overloaded", "after_chunks": 2}))


async def test_a_silent_provider_holds_the_connection_until_the_client_leaves(served: Served) -> None:
    async with served.streamed(faulty({"hang": True, "after_chunks": 1}) + " #id:silent") as answer:
        assert (await anext(answer.aiter_lines())).startswith("data: ")
        assert [a["outcome"] for a in await served.arrivals("silent")] == ["hanging"]

    async def closed() -> bool:
        return [a["outcome"] for a in await served.arrivals("silent")] == ["client_closed"]

    await eventually(closed)


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        ("#script:nonsense", "JSON"),
        ('#script:{"txt": "a"}', "turns.0.txt"),
        ('#script:{"turns": []}', "turns"),
        ('#script:{"text": "a", "faults": [{"times": 1}]}', "exactly one of"),
    ],
)
async def test_a_bad_script_is_refused_and_the_field_named(served: Served, prompt: str, named: str) -> None:
    answer = await served.post(prompt)
    assert answer.status_code == 400
    assert named in answer.json()["error"]["message"]


async def test_what_is_no_completion_request_is_refused(served: Served) -> None:
    answer = await served.http.post("/v1/chat/completions", content=b"{}")
    assert answer.status_code == 400


async def test_a_body_without_end_is_refused_and_not_kept(served: Served) -> None:
    answer = await served.http.post("/v1/chat/completions", content=b"x" * (17 * 1024 * 1024))
    assert answer.status_code == 413
