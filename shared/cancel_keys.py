"""Cancel keys: a Redis key per cancelled run that tells its executor within a fraction of a second.

PostgreSQL has the cancel already; a key that is lost only makes it slower.
"""

import asyncio
from collections.abc import Sequence
from uuid import UUID

from redis.asyncio import Redis

from sandfleet.shared.ids import Fence

_TTL_S = 600
_ANSWER_S = 1.0


def _key(run_id: UUID) -> str:
    return f"sf:cancel:{run_id}"


async def set_cancel(redis: "Redis", run_id: UUID, action: str) -> None:
    """Tell the executor of a run to end it. Raises redis.RedisError, OSError or TimeoutError when Redis does not answer
    within a second."""
    async with asyncio.timeout(_ANSWER_S):
        await redis.set(_key(run_id), action, ex=_TTL_S)


async def read_cancels(redis: "Redis", fences: Sequence[Fence]) -> dict[Fence, str]:
    """Which of these runs are to end, and how, in one round trip. Raises as `set_cancel` does."""
    async with asyncio.timeout(_ANSWER_S):
        values = await redis.mget([_key(fence.key.run_id) for fence in fences])
    return {fence: value.decode() for fence, value in zip(fences, values, strict=True) if value is not None}
