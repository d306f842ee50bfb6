"""What a gateway process counts, for Prometheus: its own requests, and the queues as PostgreSQL has them.

Not for a Lambda, which nobody could scrape: what API Gateway and CloudWatch count is there already.
"""

import asyncio
import logging
import math
import time

import psycopg
from prometheus_client import Counter, Gauge, Histogram
from psycopg_pool import PoolTimeout
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sandfleet.shared.db.pool import Pool
from sandfleet.shared.dead_letters import pool_state
from sandfleet.shared.metrics_server import OTHER

_log = logging.getLogger(__name__)

_LOOK_EVERY_S = 10.0
_RESPONSE_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)

_IN_FLIGHT = Gauge("sandfleet_http_requests_in_flight", "Requests under way, open streams included.")
_RESPONSES = Counter("sandfleet_http_responses", "Responses begun.", ["method", "route", "status"])
_RESPONSE = Histogram(
    "sandfleet_http_response_seconds",
    "From a request to the head of its response.",
    ["method", "route"],
    buckets=_RESPONSE_S,
)
_READY = Gauge("sandfleet_queue_ready_runs", "Runs that wait for an executor.", ["pool"])
_OLDEST = Gauge(
    "sandfleet_queue_oldest_ready_seconds", "Age of the run that has been ready longest.", ["pool"]
)
_RUNNING = Gauge("sandfleet_pool_runs_running", "Runs that executors hold.", ["pool"])
_EXECUTORS = Gauge("sandfleet_pool_executors", "Executors that gave a sign of life.", ["pool"])
_DEATHS = Gauge("sandfleet_pool_most_deaths", "Executor deaths in a row of the run that has most.", ["pool"])


class RequestMetrics:
    """ASGI middleware, outside of all others. Routes are named by their templates, unknown paths and methods ``other``."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = time.monotonic()

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                # Taken now: what is to be streamed lasts as long as a run.
                route = getattr(scope.get("route"), "path", OTHER)
                method = scope["method"] if route != OTHER else OTHER
                _RESPONSES.labels(method, route, str(message["status"])).inc()
                _RESPONSE.labels(method, route).observe(time.monotonic() - begun)
            await send(message)

        with _IN_FLIGHT.track_inprogress():
            await self._app(scope, receive, counted)


async def watch_queues(pool: Pool) -> None:
    """Read the state of all pools for ever, every ten seconds: a look costs one statement a pool. While PostgreSQL does
    not answer the values are NaN."""
    known: set[str] = set()
    while True:
        try:
            async with pool.connection() as connection:
                cursor = await connection.execute("select distinct pool from graphs")
                known |= {name for (name,) in await cursor.fetchall()}
                for name in known:
                    state = await pool_state(connection, name)
                    _READY.labels(name).set(state.ready)
                    _OLDEST.labels(name).set(state.oldest_ready_s)
                    _RUNNING.labels(name).set(state.running)
                    _EXECUTORS.labels(name).set(state.executors)
                    _DEATHS.labels(name).set(state.most_deaths)
        except (psycopg.Error, PoolTimeout, OSError) as error:
            _log.warning("the state of the queues cannot be read: %s", type(error).__name__)
            for gauge in (_READY, _OLDEST, _RUNNING, _EXECUTORS, _DEATHS):
                for name in known:
                    gauge.labels(name).set(math.nan)
        await asyncio.sleep(_LOOK_EVERY_S)
