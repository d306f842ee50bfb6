"""The baseline's API: accepts a run as an arq job, and streams its Redis stream as server-sent events.

Environment: ``BASELINE_REDIS_URL``, ``BASELINE_PORT``.
"""

import os
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from arq.connections import ArqRedis, RedisSettings, create_pool
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

_BLOCK_MS = 15_000


class RunCreate(BaseModel):
    """The part of a run's body that the baseline knows."""

    assistant_id: str
    input: dict[str, Any]
    stream_mode: list[str]


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    app.state.redis = await create_pool(RedisSettings.from_dsn(os.environ["BASELINE_REDIS_URL"]))
    yield
    await app.state.redis.aclose()


app = FastAPI(lifespan=_lifespan)


@app.get("/ok")
async def ok() -> dict[str, bool]:
    """Whether the process serves."""
    return {"ok": True}


@app.post("/threads")
async def create_thread() -> dict[str, str]:
    """A new thread: only a name for the checkpointer to use, so nothing is stored."""
    return {"thread_id": str(uuid.uuid4())}


@app.post("/threads/{thread_id}/runs/stream")
async def stream_run(thread_id: uuid.UUID, run: RunCreate) -> StreamingResponse:
    """Enqueue the run and stream what it says."""
    redis: ArqRedis = app.state.redis
    run_id = str(uuid.uuid4())
    await redis.enqueue_job("run_agent", run_id, str(thread_id), run.input, _job_id=run_id)
    return StreamingResponse(_events(redis, run_id), media_type="text/event-stream")


async def _events(redis: ArqRedis, run_id: str) -> AsyncIterator[bytes]:
    key, last = f"run:{run_id}", b"0-0"
    while True:
        answer = await redis.xread({key: last}, block=_BLOCK_MS)
        if not answer:
            yield b": heartbeat\n\n"
            continue
        entries = answer[0][1]
        last = entries[-1][0]
        yield b"".join(b"event: %b\ndata: %b\n\n" % (e[b"event"], e[b"data"]) for _, e in entries)
        if entries[-1][1][b"event"] == b"end":
            return


if __name__ == "__main__":
    uvicorn.run(
        app, host="127.0.0.1", port=int(os.environ["BASELINE_PORT"]), log_level="warning", access_log=False
    )
