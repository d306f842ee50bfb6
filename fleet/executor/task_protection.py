"""Scale-in protection of the ECS task that an executor is: asked for while it executes runs, so that ECS takes idle tasks.

The task asks for itself, at the endpoint of its ECS agent. An executor that could not ask goes on: it may be taken while it
works then, and hands its runs over.
"""

import time
from collections.abc import Callable

import aiohttp

_PATH = "/task-protection/v1/state"
_LIMIT_S = 5.0
_EXPIRES_MIN = 30  # of one that could not take its protection back
_RENEW_S = 10 * 60.0
_IDLE_S = 10.0
_TRY_AGAIN_S = 5.0


class TaskProtection:
    """Of one task, which has one executor. ``agent_uri`` is what ECS sets as ``ECS_AGENT_URI``.

    ``busy`` says whether runs are executed. Protection is given up after ``idle_s`` without any, since the agent bears few
    calls, and asked for again every ``renew_s``.
    """

    def __init__(
        self,
        agent_uri: str,
        busy: Callable[[], bool],
        *,
        idle_s: float = _IDLE_S,
        renew_s: float = _RENEW_S,
        try_again_s: float = _TRY_AGAIN_S,
    ) -> None:
        self._url = agent_uri.rstrip("/") + _PATH
        self._busy = busy
        self._idle_s = idle_s
        self._renew_s = renew_s
        self._try_again_s = try_again_s
        self._protected = False
        self._busy_at = -idle_s
        self._renew_at = 0.0
        self._ask_at = 0.0

    async def protect_the_task(self) -> None:
        """Ask for protection, or give it up, if it is time to. Called now and again.

        Raises aiohttp.ClientError or TimeoutError when the agent does not do it; the next call but some tries again.
        """
        now, busy = time.monotonic(), self._busy()
        if busy:
            self._busy_at = now
            due = not self._protected or now >= self._renew_at
        else:
            due = self._protected and now >= self._busy_at + self._idle_s
        if not due or now < self._ask_at:
            return
        self._ask_at = now + self._try_again_s
        await self._ask_for(busy)
        self._protected = busy
        self._renew_at = now + self._renew_s
        self._ask_at = 0.0

    async def _ask_for(self, protect: bool) -> None:
        body = {"ProtectionEnabled": protect} | ({"ExpiresInMinutes": _EXPIRES_MIN} if protect else {})
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_LIMIT_S)) as session,
            session.put(self._url, json=body, raise_for_status=True) as answer,
        ):
            await answer.read()
