"""LangGraph's own conformance suite for checkpointers, with every capability that it knows."""

from collections.abc import AsyncGenerator

import pytest
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.conformance import checkpointer_test, validate
from langgraph.checkpoint.conformance.capabilities import Capability

from tests.checkpoints.conftest import MakeSaver, StartRun


@pytest.mark.parametrize("fenced", [False, True])
async def test_the_saver_conforms(make_saver: MakeSaver, start_run: StartRun, fenced: bool) -> None:
    """With and without a fence: all eight capabilities. (Deleting for runs goes by the fence's run, not by metadata.)"""
    fence = await start_run() if fenced else None

    @checkpointer_test(name="sandfleet")
    async def savers() -> AsyncGenerator[BaseCheckpointSaver[int], None]:
        yield make_saver(fence)

    capabilities = set(Capability) - ({Capability.DELETE_FOR_RUNS} if fenced else set())
    report = await validate(savers, capabilities={c.value for c in capabilities})
    failures = [f"{name}: {why}" for name, result in report.results.items() for why in result.failures or []]
    assert failures == []
    assert {name for name, result in report.results.items() if result.passed} == {
        c.value for c in capabilities
    }
