"""Which ECS task an executor is, as its metadata endpoint says."""

import logging

import aiohttp

_log = logging.getLogger(__name__)
_LIMIT_S = 5.0


async def read_own_task(metadata_uri: str) -> str | None:
    """Id of the task whose endpoint ECS names in ``ECS_CONTAINER_METADATA_URI_V4``; None: it does not say."""
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_LIMIT_S)) as session,
            session.get(f"{metadata_uri.rstrip('/')}/task", raise_for_status=True) as answer,
        ):
            task = await answer.json(content_type=None)
        return str(task["TaskARN"]).rpartition("/")[2]
    except (aiohttp.ClientError, TimeoutError, KeyError, TypeError, ValueError) as error:
        _log.warning("ECS does not say which task this is: %s", type(error).__name__)
        return None
