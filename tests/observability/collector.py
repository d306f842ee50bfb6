"""An OpenTelemetry collector for tests: a real HTTP server that keeps the spans it is sent, or hangs."""

import gzip
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True, slots=True)
class Seen:
    """A span as it was sent."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    failed: bool


class Collector:
    """Serves until `close`. While ``hang`` is set it reads requests and never answers."""

    def __init__(self) -> None:
        self.spans: list[Seen] = []
        self.bodies: list[bytes] = []
        self.asked = 0
        self.hang = threading.Event()
        self._go = threading.Event()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.asked += 1
                if collector.hang.is_set():
                    collector._go.wait()
                    return
                collector._take(gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def _take(self, body: bytes) -> None:
        self.bodies.append(body)
        request = ExportTraceServiceRequest.FromString(body)
        for of in request.resource_spans:
            resource = _attributes(of.resource.attributes)
            for scope in of.scope_spans:
                self.spans += [
                    Seen(
                        str(resource["service.name"]),
                        span.name,
                        span.trace_id.hex(),
                        span.span_id.hex(),
                        span.parent_span_id.hex(),
                        span.start_time_unix_nano,
                        span.end_time_unix_nano,
                        _attributes(span.attributes),
                        span.status.code == 2,
                    )
                    for span in scope.spans
                ]

    def of_trace(self, trace_id: str) -> list[Seen]:
        """The spans of a trace so far."""
        return [span for span in self.spans if span.trace_id == trace_id]

    def close(self) -> None:
        """Stop; requests that hang end."""
        self._go.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value") or "string_value") for pair in pairs}
