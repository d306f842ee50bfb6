"""Read how loaded each pool is, publish it, and ask AWS for as many executors as are needed.

A schedule calls this once a minute. On the fast path a call goes on for a minute and evaluates every ten seconds; else it
only publishes, and alarms drive the fleet. An alarm's notification by SNS makes it evaluate and ask at once.
"""

import asyncio
import time
from typing import Any

import psycopg
from psycopg import AsyncConnection

from sandfleet.functions.lambda_database import connect
from sandfleet.functions.lambda_logs import lambda_logger
from sandfleet.functions.scaler.figures import figures_of, publish
from sandfleet.functions.scaler.fleet import Clients, Group, open_target
from sandfleet.shared.errors import ScalingFailed
from sandfleet.shared.permits import Permits
from sandfleet.shared.scaling.decision import Decision, Load, decide, to_retire
from sandfleet.shared.scaling.latencies import recent_latencies
from sandfleet.shared.scaling.load import busy_hosts, read_load, remember, retire, take_scaling_turn
from sandfleet.shared.scaling.settings import ScalerSettings, Target, scaler_settings
from sandfleet.shared.settings import Settings, settings

_MARGIN_S = 5.0  # what must be left of the call's time
_SQS_LIMIT_S = 2.0
_RETIRED_S = 90.0  # until the next call has come, and some

Connection = AsyncConnection[Any]

_configured = settings()
_scaling = scaler_settings()
logger = lambda_logger("sandfleet-scaler", _configured)


@logger.inject_lambda_context(clear_state=True)
def handler(event: dict[str, Any], context: Any) -> dict[str, int]:
    """Entry point of the function: a schedule's event or an alarm's by SNS. Returns what each target was asked for last.

    Raises ScalingFailed when a pool could not be read or asked for; the others were.
    """
    alarmed = any(record.get("EventSource") == "aws:sns" for record in event.get("Records", ()))
    limit_s = context.get_remaining_time_in_millis() / 1000 - _MARGIN_S
    scaler = Scaler(_configured, _scaling, acts=alarmed or _scaling.sets_counts)
    return asyncio.run(scaler.run(min(_scaling.window_s, limit_s) if _scaling.sets_counts else 0.0))


class Scaler:
    """One call of the function. ``acts``: it asks AWS for executors; else it only publishes."""

    def __init__(self, config: Settings, scaling: ScalerSettings, *, acts: bool) -> None:
        self._config = config
        self._scaling = scaling
        self._acts = acts
        self._permits = Permits(config)
        self._clients = Clients(config)
        self._desired: dict[str, int] = {}
        self._failed: set[str] = set()

    async def run(self, for_s: float) -> dict[str, int]:
        """Evaluate all pools now and every ``every_s`` until ``for_s`` have passed."""
        end = time.monotonic() + for_s
        try:
            while True:
                next_at = time.monotonic() + self._scaling.every_s
                await self._evaluate_all()
                if next_at > end:
                    break
                await asyncio.sleep(next_at - time.monotonic())
        finally:
            await self._permits.aclose()
            await self._clients.aclose()
        if self._failed:
            raise ScalingFailed(
                f"These pools could not be read or scaled: {', '.join(sorted(self._failed))}."
            )
        return self._desired

    async def _evaluate_all(self) -> None:
        pools = {*self._config.queue_urls, *self._scaling.targets}
        try:
            connection = await connect(self._config, "sandfleet-scaler")
        except psycopg.OperationalError as error:
            self._failed |= pools
            logger.error("PostgreSQL does not answer", extra={"error": type(error).__name__})
            return
        async with connection:
            for pool in sorted(pools):
                try:
                    await self._evaluate(connection, pool)
                except Exception:
                    self._failed.add(pool)
                    logger.exception("a pool could not be evaluated", extra={"pool": pool})

    async def _evaluate(self, connection: Connection, pool: str) -> None:
        target = self._scaling.targets.get(pool)
        load = await read_load(connection, pool, on_hosts=target is not None and bool(target.group))
        try:
            if target is not None:
                await self._scale(connection, pool, target, load)
        finally:
            latencies = await recent_latencies(connection, pool)
            figures = figures_of(load, self._desired.get(pool), await self._visible(pool), latencies)
            await publish(self._config, self._clients, pool, figures)

    async def _scale(self, connection: Connection, pool: str, target: Target, load: Load) -> None:
        fleet = await open_target(self._clients, target)
        if isinstance(fleet, Group):  # also where alarms act: they take any host that is not protected
            await fleet.protect(await busy_hosts(connection))
        desired, surplus = await fleet.desired(), 0
        if self._acts:
            memory = await take_scaling_turn(connection, pool, self._scaling.every_s / 2)
            if memory is None:
                return
            decision = decide(self._scaling.policy(target), load, desired, memory)
            if decision.desired != desired:
                _log_change(pool, load, desired, decision)
                await fleet.ask_for(decision.desired)
            await remember(connection, pool, decision.memory)
            desired, surplus = decision.desired, decision.surplus
        self._desired[pool] = desired
        # More than were asked for are alive: AWS wants to take some, which protect themselves until they are idle. If a newer
        # version replaces them, they must not wait for that: under a steady load the deployment would never end.
        count, newest = to_retire(load.executors, desired, surplus, replacing=False), None
        if count > 0:
            newest = await fleet.newest_tasks()
            count = to_retire(load.executors, desired, surplus, replacing=newest is not None)
        await retire(connection, pool, count, _RETIRED_S, newest)

    async def _visible(self, pool: str) -> int | None:
        """Permits in the queue, if SQS says so soon: it is a figure for people, and decides nothing."""
        if not self._permits.has_queue(pool):
            return None
        try:
            async with asyncio.timeout(_SQS_LIMIT_S):
                return await self._permits.visible(pool)
        except Exception as error:  # whatever the client raises
            logger.warning("a queue did not answer", extra={"pool": pool, "error": type(error).__name__})
            return None


def _log_change(pool: str, load: Load, before: int, decision: Decision) -> None:
    logger.info(
        "executors",
        extra={
            "pool": pool,
            "before": before,
            "desired": decision.desired,
            "ready": load.ready,
            "oldest_ready_s": round(load.oldest_s, 1),
            "busy": load.busy,
            "alive": load.executors,
            "idle": load.idle,
        },
    )
