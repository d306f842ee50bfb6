"""What a traceparent may look like, and that tracing which is off is not there."""

import subprocess
import sys

import pytest

from sandfleet.functions.api import request_context
from sandfleet.shared import tracing

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GOOD = f"00-{TRACE}-{SPAN}-01"


def test_a_traceparent_is_passed_on() -> None:
    """Red when a good header is refused, or one of a later version not cut to what is known."""
    assert tracing.parse(f" {GOOD} ") == GOOD
    assert tracing.parse(f"cc-{TRACE}-{SPAN}-01-more") == f"cc-{TRACE}-{SPAN}-01"


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        GOOD.upper(),
        f"{GOOD}-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[:-1]}-{SPAN}-01",
        f"{GOOD}\n",
        "x" * 100_000,
    ],
)
def test_what_is_none_is_ignored(header: str | None) -> None:
    """Red when a caller can have anything stored and passed on as a traceparent."""
    assert tracing.parse(header) in (None, GOOD)
    if header != f"{GOOD}\n":
        assert tracing.parse(header) is None


def test_a_lambdas_segment_is_the_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when the traces of executors do not go on from X-Ray's."""
    monkeypatch.setenv(
        "_X_AMZN_TRACE_ID", f"Root=1-{TRACE[:8]}-{TRACE[8:]};Parent={SPAN};Sampled=1;Lineage=1:a:0"
    )
    assert request_context.traceparent() == GOOD
    monkeypatch.setenv("_X_AMZN_TRACE_ID", "Root=1-5759e988-bd862e3fe1be46a994272793")
    assert request_context.traceparent() is None


def test_without_an_endpoint_nothing_of_opentelemetry_is_imported() -> None:
    """Red when tracing costs those who do not use it, at their start or on each span. (LangSmith, which LangChain has,
    imports the SDK by itself where that is installed, and FastAPI the interface.)"""
    program = """
import sys
import sandfleet.fleet.sandbox.run_sandbox, sandfleet.functions.api.app
from sandfleet.shared import tracing
from sandfleet.shared.settings import read_settings
tracing.start("test", read_settings())
with tracing.span("a") as span:
    span.set("b", 1)
    assert tracing.current_traceparent() is None
assert tracing.span("a") is tracing.span("b")
print([name for name in sys.modules if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter"))])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "[]"
