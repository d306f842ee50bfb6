"""What a log line may hold."""

import json
import logging
import subprocess
import sys

import orjson
import pytest

from sandfleet.shared import logs

MARK = "m4rked-c0ntent"


def failing() -> Exception:
    def inner(value: str) -> None:
        raise KeyError(value)

    try:
        try:
            inner(MARK)
        except KeyError as error:
            raise ValueError(f"because of {MARK}") from error
    except ValueError as error:
        return error


def test_an_exception_is_its_types_and_places() -> None:
    """Red when a message is logged, which quotes what it is about, or when the cause or its place is missing."""
    described = logs.described(failing())
    assert [one["type"] for one in described] == ["ValueError", "KeyError"]
    assert described[1]["at"][-1].endswith(" inner")
    assert MARK.encode() not in orjson.dumps(described)


def record(name: str, path: str, message: str, *args: object) -> logging.LogRecord:
    return logging.LogRecord(name, logging.WARNING, path, 1, message, args, None)


@pytest.mark.parametrize(
    ("name", "path", "message", "args", "said"),
    [
        ("sandfleet.fleet", logging.__file__, "run %s", ("r",), "run r"),
        ("my_project.nodes", "/app/my_project/nodes.py", "saw %s", (MARK,), f"saw {MARK}"),
        (
            "langgraph.pregel",
            logging.__file__,
            f"retrying after {MARK}",
            (),
            "(withheld: a library's message may hold content)",
        ),
        (
            "a.library",
            logging.__file__,
            "gave up after %d tries: %s",
            (3, MARK),
            "gave up after %d tries: %s",
        ),
        (
            "asyncio",
            "/app/my_project/nodes.py",
            f"Task exception was never retrieved\nfuture: {MARK}",
            (),
            "Task exception was never retrieved",
        ),
    ],
)
def test_a_librarys_message_is_withheld_and_a_projects_own_is_not(
    name: str, path: str, message: str, args: tuple[object, ...], said: str
) -> None:
    """Red when a library's message is logged with what it quotes, or an author cannot log."""
    assert logs.message_of(record(name, path, message, *args)) == said


_LAMBDA = f"""
import logging
from sandfleet.functions.lambda_logs import failing_without_content, lambda_logger
from sandfleet.shared import logs
from sandfleet.shared.settings import read_settings

logger = lambda_logger("sandfleet-test", read_settings())
logs.about.set({{"tenant": "t", "run_id": "r"}})

@failing_without_content(logger)
def handler(event, context):
    raise ValueError(event["body"])

logging.getLogger("sandfleet.shared.waker").warning("ring failed: %s", "TimeoutError")
logging.getLogger("mangum.http").error("An error occurred running the application.", exc_info=ValueError("{MARK}"))
library = logging.getLogger("botocore.parsers")
library.handle(library.makeRecord(library.name, 40, logging.__file__, 1, "Response body: {MARK}", (), None))
handler({{"body": "{MARK}"}}, None)
"""


def test_a_lambda_logs_by_the_same_rules() -> None:
    """Red when an exception of a function, or a library's words, reach CloudWatch with their content, or a line twice."""
    done = subprocess.run(
        [sys.executable, "-c", _LAMBDA], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 1
    assert "FunctionFailed: ValueError" in done.stderr
    assert MARK not in done.stdout + done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["message"] for line in lines] == [
        "ring failed: TimeoutError",
        "An error occurred running the application.",
        "(withheld: a library's message may hold content)",
        "the function failed",
    ]
    assert all(line["tenant"] == "t" and line["run_id"] == "r" for line in lines)
    assert lines[3]["exception"][0]["type"] == "ValueError"
