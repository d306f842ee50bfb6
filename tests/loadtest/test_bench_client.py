"""The benchmark's own client and arithmetic: what it reads from a stream, how it sums up."""

import asyncio
import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from sandfleet.loadtest.bench.figures import figures
from sandfleet.loadtest.bench.http import Connection, ConnectionLost, Exchange
from sandfleet.loadtest.bench.loop import Round, Sample
from sandfleet.loadtest.bench.report import machine, print_report
from sandfleet.loadtest.bench.stream import RunStream
from tests.loadtest.served import Served, script

STREAM = (
    b'event: metadata\ndata: {"run_id":"1","attempt":1}\n\n'
    b": heartbeat\n\n"
    b'id: 1-2\nevent: messages\ndata: [{"content":"","type":"AIMessageChunk"},{}]\n\n'
    b'event: messages\r\ndata: [{"content":"Hi "},{}]\r\n\r\n'
    b'event: messages\ndata: [{"content":"there"},{}]\n\n'
    b"event: end\ndata: null\n\n"
)


@given(st.lists(st.integers(1, len(STREAM) - 1)))
def test_a_stream_reads_the_same_however_it_is_cut(cuts: list[int]) -> None:
    """Breaks when a piece of the body is taken for whole events."""
    asyncio.run(_read_cut(sorted({0, *cuts, len(STREAM)})))


async def _read_cut(edges: list[int]) -> None:
    stream = RunStream()
    stream.status = 200
    for at_s, (begin, end) in enumerate(itertools.pairwise(edges), start=1):
        stream.feed(STREAM[begin:end], at_s)
    first = STREAM.index(b"Hi ") + STREAM[STREAM.index(b"Hi ") :].index(b"\r\n\r\n") + 4
    assert stream.text == "Hi there"
    assert stream.first_token_at_s == next(n for n, edge in enumerate(edges) if edge >= first)
    assert stream.terminal_at_s == len(edges) - 1
    assert stream.error is None


async def test_an_error_event_is_kept() -> None:
    stream = RunStream()
    stream.status = 200
    stream.feed(b'event: error\ndata: {"error":"ValueError"}\n\n', 1.0)
    assert stream.error == '{"error":"ValueError"}'


async def test_a_connection_is_used_again_and_again(served: Served) -> None:
    connection = await Connection.open(served.url, {})
    answers = [await connection.ask(Exchange(), "GET", "/v1/models") for _ in range(3)]
    connection.close()
    assert [answer.status for answer in answers] == [200, 200, 200]
    assert len({answer.body for answer in answers}) == 1
    assert all(answer.head_at_s <= answer.end_at_s for answer in answers)


async def test_a_lost_connection_is_an_error_and_not_a_silence(served: Served) -> None:
    connection = await Connection.open(served.url, {})
    body = json.dumps(served.body(script(text="abcd", faults=[{"drop": True, "after_chunks": 1}]))).encode()
    with pytest.raises(ConnectionLost):
        await connection.ask(Exchange(), "POST", "/v1/chat/completions", body)
    assert connection.closed


def _sample(ms: float, failure: str | None = None) -> Sample:
    at_s = 100.0
    return Sample("x", at_s, at_s + 0.001, at_s + 0.002, at_s + 0.003, at_s + 0.001 + ms / 1000, failure)


def test_figures_leave_failed_runs_out_and_count_them() -> None:
    good = [_sample(ms) for ms in range(1, 101)]
    rounds = [Round(good, 2.0, {"api": 150.0}), Round([_sample(9999, "lost")], 1.0, {"api": 52.0})]
    found = figures("sandfleet", 10, rounds)
    assert found.failures == 1
    assert found.failure_messages == ["lost"]
    assert found.runs_per_s == pytest.approx(100 / 3)
    assert found.latencies_ms["accept→end"] == pytest.approx((50, 95))
    assert found.cpu_ms_per_run == {"api": pytest.approx(202 / 101)}


def test_the_report_is_plain_text_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    ours = figures("sandfleet", 10, [Round([_sample(5)] * 3, 0.1, {"api": 3.0})])
    base = figures("baseline", 10, [Round([_sample(5)] * 3, 0.3, {"worker": 3.0})])
    print_report(Console(width=160, no_color=True), [ours, base], machine(), {"model delay": "0 ms"})
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "10 clients: 3.00 times the baseline's runs/s" in out
    for part in ("submit→accept", "accept→model", "accept→token", "accept→end", "runs/s", "worker"):
        assert part in out
