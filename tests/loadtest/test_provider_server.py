"""The scripted provider as a server: the record of arrivals, its other routes, its process."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx

from tests.loadtest.served import Served


async def test_an_arrival_is_recorded_on_the_clock_that_all_processes_share(served: Served) -> None:
    before = time.monotonic()
    await served.post("hi #id:timed")
    after = time.monotonic()
    (arrival,) = await served.arrivals("timed")
    assert before <= arrival["monotonic_s"] <= after
    assert {k: arrival[k] for k in ("model", "turn", "stream", "outcome")} == {
        "model": "scripted",
        "turn": 0,
        "stream": True,
        "outcome": "answered",
    }


async def test_the_correlation_id_can_come_in_a_header(served: Served) -> None:
    headers = {"X-Correlation-Id": "by-header"}
    await served.http.post("/v1/chat/completions", json=served.body(), headers=headers)
    assert len(await served.arrivals("by-header")) == 1


async def test_reset_forgets_all_arrivals(served: Served) -> None:
    await served.post()
    await served.http.post("/_reset")
    assert await served.arrivals() == []


async def test_models_are_listed(served: Served) -> None:
    names = {m["id"] for m in (await served.http.get("/v1/models")).json()["data"]}
    assert {"scripted", "scripted-coder"} <= names


async def test_an_unknown_route_is_not_found(served: Served) -> None:
    assert (await served.http.get("/v1/nothing")).status_code == 404


def test_the_process_serves_scripts_by_model_name_and_ends_cleanly_on_sigterm(tmp_path: Path) -> None:
    file = tmp_path / "scripts.json"
    file.write_text(json.dumps({"parrot": {"text": "You said {{prompt}}"}, "default": {"text": "Anyone"}}))
    command = [sys.executable, "-m", "sandfleet.loadtest.provider", "--port", "0", "--script", str(file)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            port = json.loads(process.stderr.readline())["port"]

            def ask(model: str) -> str:
                body = {"model": model, "messages": [{"role": "user", "content": "hello"}]}
                answer = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body)
                content: str = answer.json()["choices"][0]["message"]["content"]
                return content

            assert ask("parrot") == "You said hello"
            assert ask("unheard-of") == "Anyone"
            assert ask("scripted").startswith("Hi!")
        finally:
            process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=10)
    assert process.returncode == 0
    assert out == "", "stdout stays empty"


def test_a_bad_script_file_ends_the_process_and_is_named(tmp_path: Path) -> None:
    file = tmp_path / "scripts.json"
    file.write_text('{"parrot": {"txt": "x"}}')
    command = [sys.executable, "-m", "sandfleet.loadtest.provider", "--port", "0", "--script", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 2
    assert "turns.0.txt" in done.stderr
