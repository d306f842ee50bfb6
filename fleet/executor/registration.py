"""Telling the API what this executor serves: graphs, their assistants, and that it is alive."""

import asyncio
import logging
import time
from typing import Any, NamedTuple
from uuid import uuid4

import orjson
import psycopg
from psycopg import AsyncConnection

from sandfleet.fleet.executor.session import Session
from sandfleet.fleet.graphs.description import drawings, schemas
from sandfleet.fleet.graphs.loading import Graph
from sandfleet.shared.ids import graph_assistant_id
from sandfleet.shared.templates import Templates

_log = logging.getLogger(__name__)

_PATIENCE_S = 60.0
_AGAIN_S = 0.5

Connection = AsyncConnection[Any]


def executor_id(pool: str) -> str:
    """A name for a new executor."""
    return f"{pool}-{uuid4().hex[:12]}"


async def register_graphs(
    connection: Connection, pool: str, graphs: dict[str, Graph], templates: Templates
) -> None:
    """Store each graph's description, what sandboxes it offers, and make the assistant that every graph has from the start."""
    for graph_id, graph in graphs.items():
        async with graph.open({"configurable": {}}) as compiled:
            described = orjson.dumps(schemas(compiled), default=str).decode()
            drawn = orjson.dumps(await drawings(compiled), default=str).decode()
        async with connection.transaction():
            await connection.execute(
                """insert into graphs (graph_id, pool, schemas, drawings, sandbox_templates)
                   values (%s, %s, %s::json, %s::json, %s)
                   on conflict (graph_id) do update set pool = excluded.pool, schemas = excluded.schemas,
                     drawings = excluded.drawings, sandbox_templates = excluded.sandbox_templates,
                     registered_at = clock_timestamp()""",
                (graph_id, pool, described, drawn, templates.offered(graph_id)),
            )
            await connection.execute(
                """insert into assistants (tenant, user_id, assistant_id, graph_id, name, metadata)
                   values ('', '', %s, %s, %s, '{"created_by": "system"}') on conflict do nothing""",
                (graph_assistant_id(graph_id), graph_id, graph_id),
            )


async def register_when_reachable(
    session: Session, pool: str, graphs: dict[str, Graph], templates: Templates
) -> None:
    """`register_graphs`, as soon as PostgreSQL answers. Raises what it raises, and that it has not answered for a minute."""
    give_up_at = time.monotonic() + _PATIENCE_S
    while True:
        try:
            async with session.connection() as connection:
                await register_graphs(connection, pool, graphs, templates)
            return
        except (psycopg.OperationalError, OSError, TimeoutError) as error:
            if time.monotonic() > give_up_at:
                raise
            _log.warning("PostgreSQL does not answer yet: %s", type(error).__name__)
            await asyncio.sleep(_AGAIN_S)


class Orders(NamedTuple):
    """What an executor is told when it beats."""

    retiring: bool
    """It is one too many, and should take nothing more."""
    replaced: bool
    """A newer version takes its place: it should not wait for the ends of its runs, but hand them over."""


async def heartbeat(
    connection: Connection,
    executor_id: str,
    pool: str,
    host_id: str | None,
    *,
    slots: int,
    busy: int,
    loop_lag_ms: int,
    task: str | None = None,
    draining: bool = False,
) -> Orders:
    """Say that this executor is alive, how full it is and how late its graphs' loop was, on the database's clock.

    ``host_id`` is the sandbox host of its machine, if the machine is to be known as one; ``task`` the ECS task that it is.
    An executor that is ``draining`` retires for good.
    """
    cursor = await connection.execute(
        """insert into executors (executor_id, pool, host_id, slots, busy, loop_lag_ms, task, retiring_until)
             values (%s, %s, %s, %s, %s, %s, %s, %s::timestamptz)
           on conflict (executor_id) do update set busy = excluded.busy, loop_lag_ms = excluded.loop_lag_ms,
             heartbeat_at = clock_timestamp(), task = excluded.task,
             retiring_until = coalesce(excluded.retiring_until, executors.retiring_until)
           returning coalesce(retiring_until > clock_timestamp(), false),
             replaced and coalesce(retiring_until > clock_timestamp(), false)""",
        (executor_id, pool, host_id, slots, busy, loop_lag_ms, task, "infinity" if draining else None),
    )
    row = await cursor.fetchone()
    assert row is not None
    return Orders(*row)


async def sign_off(connection: Connection, executor_id: str) -> None:
    """Forget this executor. (The sweep forgets those that could not sign off.)"""
    await connection.execute("delete from executors where executor_id = %s", (executor_id,))
