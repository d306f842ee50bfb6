"""The baseline's worker: an arq worker that runs the agent with the stock checkpointer and streams to Redis.

Environment: ``BASELINE_REDIS_URL``, ``BASELINE_DATABASE_URL``, ``BASELINE_AGENT`` (``path/to/file.py:name``), and what
the agent itself reads.
"""

import asyncio
import importlib
import logging
import os
import sys
from pathlib import Path
from typing import Any

import orjson
import uvloop
from arq.connections import RedisSettings
from arq.worker import Worker, func
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from langgraph.graph.state import CompiledStateGraph
from psycopg.rows import dict_row
from psycopg_pool import AsyncConnectionPool

POLL_DELAY_S = 0.01
MAX_JOBS = 100
POOL_SIZE = 20
_STREAM_TTL_S = 600


def _load_agent(reference: str) -> CompiledStateGraph[Any, Any, Any, Any]:
    file, _, name = reference.partition(":")
    sys.path.insert(0, str(Path(file).resolve().parent))
    graph: CompiledStateGraph[Any, Any, Any, Any] = getattr(importlib.import_module(Path(file).stem), name)
    return graph


async def _start(ctx: dict[str, Any]) -> None:
    pool = AsyncConnectionPool(
        os.environ["BASELINE_DATABASE_URL"],
        min_size=POOL_SIZE,
        max_size=POOL_SIZE,
        open=False,
        kwargs={"autocommit": True, "prepare_threshold": 0, "row_factory": dict_row},
    )
    await pool.open(wait=True)
    saver = AsyncPostgresSaver(pool)  # type: ignore[arg-type]
    await saver.setup()
    ctx["pool"] = pool
    ctx["graph"] = _load_agent(os.environ["BASELINE_AGENT"]).copy(update={"checkpointer": saver})


async def _stop(ctx: dict[str, Any]) -> None:
    await ctx["pool"].close()


async def run_agent(ctx: dict[str, Any], run_id: str, thread_id: str, input: dict[str, Any]) -> None:
    """Run the agent on a thread; every message chunk becomes an entry of the stream ``run:{run_id}``."""
    redis, key = ctx["redis"], f"run:{run_id}"
    try:
        stream = ctx["graph"].astream(
            input, {"configurable": {"thread_id": thread_id}}, stream_mode="messages"
        )
        async for message, metadata in stream:
            data = orjson.dumps([message.model_dump(), metadata], default=str)
            await redis.xadd(key, {"event": "messages", "data": data})
    except Exception as error:
        data = orjson.dumps({"error": type(error).__name__, "message": str(error)})
        await redis.xadd(key, {"event": "error", "data": data})
        raise
    finally:
        async with redis.pipeline(transaction=False) as pipe:
            pipe.xadd(key, {"event": "end", "data": "null"})
            pipe.expire(key, _STREAM_TTL_S)
            await pipe.execute()


def main() -> None:
    """Run the worker until SIGTERM."""
    logging.basicConfig(level=logging.WARNING)
    asyncio.set_event_loop(uvloop.new_event_loop())
    Worker(
        functions=[func(run_agent, keep_result=60)],
        redis_settings=RedisSettings.from_dsn(os.environ["BASELINE_REDIS_URL"]),
        on_startup=_start,
        on_shutdown=_stop,
        poll_delay=POLL_DELAY_S,
        max_jobs=MAX_JOBS,
        log_results=False,
    ).run()


if __name__ == "__main__":
    main()
