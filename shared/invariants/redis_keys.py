"""The rule within Redis: nothing stays for ever."""

import asyncio

from redis.asyncio import Redis

from sandfleet.shared.invariants import Violation

_PAGE = 1_000
_SHOWN = 100
_LOOK_AGAIN_S = 1.0  # a key gets its time to live by the command after the one that makes it


async def check_keys(redis: Redis) -> tuple[list[Violation], int]:
    """Find sandfleet's keys without a time to live; returns them and how many keys there are. Scans in small pages."""
    immortal: list[bytes] = []
    count = 0
    page: list[bytes] = []
    async for key in redis.scan_iter(match="sf:*", count=_PAGE):
        page.append(key)
        if len(page) == _PAGE:
            count += len(page)
            immortal += await _immortal(redis, page)
            page = []
    count += len(page)
    immortal += await _immortal(redis, page)
    if immortal:
        await asyncio.sleep(_LOOK_AGAIN_S)
        immortal = await _immortal(redis, immortal)
    return [
        Violation("Redis key without a time to live", key.decode(errors="replace"), "it would stay for ever")
        for key in immortal[:_SHOWN]
    ], count


async def _immortal(redis: Redis, keys: list[bytes]) -> list[bytes]:
    async with redis.pipeline(transaction=False) as pipe:
        for key in keys:
            pipe.ttl(key)
        times: list[int] = await pipe.execute()
    return [key for key, ttl in zip(keys, times, strict=True) if ttl == -1]
