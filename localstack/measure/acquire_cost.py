"""Time to a sandbox and the end of its first command: warm, cold and with a network, beside ``docker run`` and ``docker exec``."""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from sandfleet.loadtest.percentile import percentile
from sandfleet.localstack.measure import swe_rex
from sandfleet.localstack.measure.bed import IMAGE, Bed, timed
from sandfleet.localstack.measure.exec_cost import docker_exec
from sandfleet.localstack.measure.tables import show

_OURS = {"warm": "warm", "cold": "cold", "cold, network": "open"}
_PLAIN = "docker run + exec"
_SWE_REX = "SWE-ReX"
_MOST_ROUNDS = 10


def templates(warm: int) -> str:
    """What `measure` needs, with so many warm sandboxes."""
    return f'[templates.warm]\nwarm = {warm}\n[templates.cold]\n[templates.open]\nnetwork = "egress"\n'


async def measure(bed: Bed, numbers: list[int], swe_rex_in: Path | None) -> None:
    """Print a table of bursts of so many at once, for which the pool is as large as the largest; the kinds take turns.
    SWE-ReX is among them with an environment that has it."""
    pool = max(numbers)
    rows = []
    async with AsyncExitStack() as stack:
        kinds: dict[str, Callable[[int], Awaitable[list[float]]]] = {
            name: partial(_ours, bed, template) for name, template in _OURS.items()
        }
        kinds[_PLAIN] = partial(_plain, bed)
        if swe_rex_in is not None:
            image = await stack.enter_async_context(swe_rex.image(bed, swe_rex_in))
            kinds[_SWE_REX] = partial(swe_rex.burst, bed, swe_rex_in, image)
        for number in numbers:
            rows += await _compared(bed, kinds, number, pool)
    headings = ("at once", "kind", "times", "p50 ms", "p95 ms", "most ms", "quicker than docker run")
    show("A sandbox and its first command", headings, rows)


async def _compared(
    bed: Bed, kinds: dict[str, Callable[[int], Awaitable[list[float]]]], number: int, pool: int
) -> list[tuple[object, ...]]:
    spent: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(max(1, min(_MOST_ROUNDS, pool // (3 * number)))):
        for name, burst in kinds.items():
            await bed.warm(pool)
            spent[name] += await burst(number)
    base = percentile(spent[_PLAIN], 50)
    rows: list[tuple[object, ...]] = []
    for name, each in spent.items():
        p50, p95, most = (percentile(each, percent) for percent in (50, 95, 100))
        figures = (f"{seconds * 1000:.0f}" for seconds in (p50, p95, most))
        rows.append((number, name, len(each), *figures, f"{base / p50:.1f} ×"))
    return rows


async def _ours(bed: Bed, template: str, number: int) -> list[float]:
    sandboxes = [await bed.sandbox(template) for _ in range(number)]
    spent = await _burst([partial(each.exec, ["true"], timeout_s=300) for each in sandboxes])
    await bed.close_all(sandboxes)
    return spent


async def _plain(bed: Bed, number: int) -> list[float]:
    """Containers without limits, hardening or network of the same image, as simply as the engine makes them."""
    names = [f"sandfleet-measure-{secrets.token_hex(6)}" for _ in range(number)]
    labels = {"sandfleet.instance": bed.stack.info.instance}  # the stack's end removes what is left
    body = {"Image": IMAGE, "Cmd": ["sleep", "600"], "Labels": labels, "HostConfig": {"NetworkMode": "none"}}

    async def first(name: str) -> None:
        await bed.engine.call("POST", "/containers/create", params={"name": name}, body=body)
        await bed.engine.call("POST", f"/containers/{name}/start")
        await docker_exec(bed, name)

    spent = await _burst([partial(first, name) for name in names])
    await asyncio.gather(*(bed.engine.remove_container(name) for name in names))
    return spent


async def _burst(calls: Sequence[Callable[[], Awaitable[object]]]) -> list[float]:
    return list(await asyncio.gather(*(timed(call) for call in calls)))
