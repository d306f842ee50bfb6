"""Rings: a Redis list per pool that idle executors block on. They save the queue's latency and may all be lost."""

import asyncio
from collections.abc import Awaitable
from typing import cast

from redis.asyncio import Redis

_KEEP = 1_000  # rings that a list keeps: more than any fleet has idle executors
_TTL_S = 60
_PATIENCE_S = 3.0  # beyond a block's own time
_ANSWER_S = 1.0  # a Redis that hangs keeps nobody: a ring is not worth more


def ring_key(pool: str) -> str:
    """The list that the idle executors of a pool block on."""
    return f"sf:ring:{pool}"


async def ring(redis: "Redis", counts: dict[str, int]) -> None:
    """Ring ``counts[pool]`` times per pool, in one round trip. Raises redis.RedisError, OSError or TimeoutError when Redis
    does not answer within a second."""
    async with asyncio.timeout(_ANSWER_S), redis.pipeline(transaction=True) as pipe:
        for pool, count in counts.items():
            key = ring_key(pool)
            pipe.rpush(key, *["1"] * min(count, _KEEP))
            pipe.ltrim(key, -_KEEP, -1)
            pipe.expire(key, _TTL_S)
        await pipe.execute()


async def wait_for_ring(redis: "Redis", pool: str, timeout_s: int) -> bool:
    """Block until somebody rings or the time is over; true if somebody rang. Raises as `ring` does, soon after that."""
    async with asyncio.timeout(timeout_s + _PATIENCE_S):
        return await cast(Awaitable[object], redis.blpop([ring_key(pool)], timeout=timeout_s)) is not None
