"""Where a run failed, by what its graph has raised."""

import pytest

from sandfleet.fleet.executor.failure_stage import of_graph_error
from sandfleet.fleet.sandbox.errors import SandboxLost

MODEL, TOOL = RuntimeError("model"), RuntimeError("tool")


def from_cause(cause: BaseException) -> BaseException:
    error = ValueError("what the graph made of it")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "stage"),
    [
        (MODEL, "model"),
        (from_cause(from_cause(TOOL)), "tool"),
        (from_cause(SandboxLost("gone")), "sandbox"),
        (ValueError("its own"), "graph"),
    ],
)
def test_an_error_is_its_cause_s(error: BaseException, stage: str) -> None:
    """Red when only the outermost error is looked at: graphs wrap what they catch."""
    assert of_graph_error(error, model=MODEL, tool=TOOL) == stage


@pytest.mark.timeout(10)
def test_causes_that_go_round_in_a_circle_are_followed_once() -> None:
    """``raise error from error`` is all it takes. Red when they are followed for ever: all runs of the executor would hang."""
    error = ValueError("its own cause")
    error.__cause__ = error
    assert of_graph_error(error, model=MODEL, tool=TOOL) == "graph"
