"""One trace for a run, from the API to the model call, exported by OpenTelemetry over OTLP/HTTP.

Off unless ``SANDFLEET_OTLP_ENDPOINT`` is set; then nothing of OpenTelemetry is imported. A W3C ``traceparent`` is passed on
all the same, for whoever traces further on. Spans carry ids, names that the graph's author gave, and numbers; never what a
tenant sent or a model said, nor the message of an exception.
"""

import logging
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

from sandfleet.shared.settings import Settings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span as OtelSpan
    from opentelemetry.trace import Tracer

_log = logging.getLogger(__name__)

Kind = Literal["internal", "server", "client", "producer", "consumer"]
Attributes = Mapping[str, str | int | float | bool]

_TRACEPARENT = re.compile(
    r"(?P<version>(?!ff)[0-9a-f]{2})-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?P<more>-.*)?"
)

_tracer: "Tracer | None" = None
_provider: "TracerProvider | None" = None


def parse(header: str | None) -> str | None:
    """A ``traceparent`` that may be passed on; None for anything else. Of a later version than 00 the four parts that we
    know are taken."""
    found = _TRACEPARENT.fullmatch((header or "").strip())
    if found is None or (found["more"] and found["version"] == "00"):
        return None
    return found.group()[:55]


class Span:
    """A span that has begun. Without tracing it is the empty one, on which everything does nothing."""

    __slots__ = ("_span",)

    def __init__(self, span: "OtelSpan | None" = None) -> None:
        self._span = span

    def set(self, name: str, value: str | int | float | bool) -> None:
        """Give it an attribute."""
        if self._span is not None:
            self._span.set_attribute(name, value)

    def rename(self, name: str) -> None:
        """Give it another name, once that is known."""
        if self._span is not None:
            self._span.update_name(name)

    def failed(self, kind: str) -> None:
        """Mark it as failed by an error of this kind: a class's name or a stable code."""
        if self._span is not None:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_attribute("error.type", kind)
            self._span.set_status(Status(StatusCode.ERROR))

    def end(self, at: float | None = None) -> None:
        """End it now, or as of the monotonic time ``at``. Again does nothing."""
        if self._span is not None:
            self._span.end(_wall_ns(at))

    def make_current(self) -> None:
        """What begins later in this task or thread, and in those that it starts, is a part of this span."""
        if self._span is not None:
            from opentelemetry import context, trace

            context.attach(trace.set_span_in_context(self._span))

    @property
    def traceparent(self) -> str | None:
        """What names it as the parent for others."""
        if self._span is None:
            return None
        of = self._span.get_span_context()
        return f"00-{of.trace_id:032x}-{of.span_id:016x}-{int(of.trace_flags):02x}" if of.is_valid else None


def _wall_ns(monotonic: float | None) -> int | None:
    """The Unix time of a monotonic one, in ns."""
    return None if monotonic is None else time.time_ns() - int((time.monotonic() - monotonic) * 1e9)


_NO_SPAN = Span()
_OFF: AbstractContextManager[Span] = nullcontext(_NO_SPAN)


def start(service: str, settings: Settings, **resource: str) -> None:
    """Begin to trace if an endpoint is set. ``resource`` says what this process is. Raises ImportError when the extra
    ``otel`` is not installed.

    Spans are sent in batches by a thread of their own; what a collector does not take in time is dropped.
    """
    global _tracer, _provider
    if not settings.otlp_endpoint:
        return
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    # Not the global provider: that one is the graph author's, should he trace too. The context is shared, so his spans
    # are parts of ours.
    provider = TracerProvider(
        resource=Resource.create({"service.name": service, **resource}), shutdown_on_exit=False
    )
    exporter = OTLPSpanExporter(endpoint=settings.otlp_endpoint.rstrip("/") + "/v1/traces")
    provider.add_span_processor(BatchSpanProcessor(exporter))
    _provider, _tracer = provider, provider.get_tracer("sandfleet")
    _log.info("traces are sent", extra={"endpoint": settings.otlp_endpoint})


def on() -> bool:
    """Whether this process traces."""
    return _tracer is not None


def begin(
    name: str,
    attributes: Attributes | None = None,
    *,
    parent: str | None = None,
    kind: Kind = "internal",
    since: float | None = None,
) -> Span:
    """A span that the caller ends; it has begun now, or at the monotonic time ``since``. ``parent`` is a traceparent that was parsed; without it
    the current span is the parent."""
    if _tracer is None:
        return _NO_SPAN
    from opentelemetry.trace import SpanKind

    context = None if parent is None else _context_of(parent)
    return Span(
        _tracer.start_span(
            name,
            context,
            kind=SpanKind[kind.upper()],
            attributes=dict(attributes or {}),
            start_time=_wall_ns(since),
        )
    )


def span(
    name: str,
    attributes: Attributes | None = None,
    *,
    parent: str | None = None,
    kind: Kind = "internal",
    since: float | None = None,
) -> AbstractContextManager[Span]:
    """The block as a span, which is the current one within it. What it raises is named by its type only."""
    if _tracer is None:
        return _OFF
    return _block(begin(name, attributes, parent=parent, kind=kind, since=since))


def past(name: str, since: float) -> None:
    """A span that has begun at the monotonic time ``since`` and ends now."""
    if _tracer is not None:
        begin(name, since=since).end()


def current_traceparent() -> str | None:
    """The current span of this task or thread, as others name it; None without tracing."""
    if _tracer is None:
        return None
    from opentelemetry import trace

    return Span(trace.get_current_span()).traceparent


def stop(timeout_s: float) -> bool:
    """Send off what is left, for ``timeout_s`` at most; call it in a thread that may be left. Whether all was sent."""
    return _provider is None or _provider.force_flush(int(timeout_s * 1000))


@contextmanager
def _block(made: Span) -> Iterator[Span]:
    from opentelemetry import context, trace

    assert made._span is not None
    token = context.attach(trace.set_span_in_context(made._span))
    try:
        yield made
    except BaseException as error:
        made.failed(type(error).__name__)
        raise
    finally:
        made.end()
        context.detach(token)


def _context_of(traceparent: str) -> Any:
    from opentelemetry import trace

    _, trace_id, span_id, flags = traceparent.split("-")
    remote = trace.SpanContext(
        int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=trace.TraceFlags(int(flags, 16) & 1)
    )
    return trace.set_span_in_context(trace.NonRecordingSpan(remote))
