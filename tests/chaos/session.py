"""One session of chaos on a running stack: load, faults, quiet, verdict."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

import psycopg

from sandfleet.localstack.deployment_check import check_stack
from sandfleet.localstack.stack import Stack
from sandfleet.shared.invariants import GONE_S
from tests.chaos.api import Api
from tests.chaos.ends import Ends
from tests.chaos.faults import Faults
from tests.chaos.schedule import schedule
from tests.chaos.submitters import Submitters
from tests.chaos.verdict import verdict
from tests.chaos.workload import threads

SETTINGS = {
    "SANDFLEET_LEASE_S": "5",
    "SANDFLEET_RENEW_EVERY_S": "1",
    "SANDFLEET_SWEEP_EVERY_S": "0.5",
    "SANDFLEET_LONG_POLL_S": "5",
    "SANDFLEET_VISIBILITY_TIMEOUT_S": "20",
    "SANDFLEET_DRAIN_GRACE_S": "1",
}
"""Settings of the stack under chaos: recovery within seconds, so that many faults fit in a minute."""

CLIENTS = 48
NO_PROGRESS_S = 120.0
"""Without a fault and without a single run that ends, for this long: the rest is lost."""


@dataclass
class Report:
    """What a session did and found. ``problems`` empty means that it passed."""

    seed: int
    runs: int = 0
    threads: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    attempts: Counter[int] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    deaths: Counter[str] = field(default_factory=Counter)
    streams: int = 0
    connections: int = 0
    retries: int = 0
    load_s: float = 0.0
    problems: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """For people."""
        return [
            f"seed {self.seed}: {self.runs} runs accepted on {self.threads} threads in {self.load_s:.0f} s"
            f" ({self.runs / max(self.load_s, 0.001):.1f} runs/s), {self.retries} requests sent again",
            f"ends: {_counts(self.statuses)}",
            f"attempts: {_counts(Counter({str(n): count for n, count in sorted(self.attempts.items())}))}",
            f"faults: {self.faults.total()} ({_counts(self.faults)})",
            f"started again: {_counts(self.deaths)}",
            f"streams: {self.streams} followed over {self.connections} connections",
            *(f"PROBLEM {problem}" for problem in self.problems),
            f"{'FAILED' if self.problems else 'passed'}; make chaos SEED={self.seed} replays the faults",
        ]


async def chaos(
    stack: Stack,
    seed: int,
    runs: int,
    effects: Path,
    points: Path,
    *,
    faults_s: float | None = None,
    asked_s: float | None = None,
    harm: int = 1,
    say: Callable[[str], None] = lambda _: None,
) -> Report:
    """Have at least ``runs`` runs done under the faults of ``seed``, for ``faults_s`` seconds or all the time.

    After ``asked_s`` seconds nothing more is asked for, and the verdict is on what was. ``harm`` is the schedule's.
    The stack has two APIs, three executors, `SETTINGS`, the file ``effects`` for its tools, and the folder
    ``points`` for its fault points.
    """
    report = Report(seed)
    api = Api(stack.info.api_urls, stack.info.api_key, seed)
    ends = Ends(stack.info.database_url)
    faults = Faults(stack, points, say)
    submitters = Submitters(api, ends, seed)
    begun = time.monotonic()
    work = takewhile(
        lambda _: asked_s is None or time.monotonic() < begun + asked_s,
        threads(seed, runs, sandboxes=stack.info.docker_host is not None),
    )
    watching = asyncio.create_task(ends.watch())
    try:
        async with faults.restarting():
            submitting = asyncio.create_task(submitters.submit_all(work, CLIENTS))
            harming = asyncio.create_task(faults.carry_out(schedule(seed, harm)))
            await asyncio.wait({submitting, harming}, timeout=faults_s, return_when="FIRST_COMPLETED")
            if harming.done():
                harming.result()  # it has no end of its own
            harming.cancel()
            with suppress(asyncio.CancelledError):
                await harming
            faults.recover()
            say("no more faults")
            await _quiet(submitting, ends)
        report.load_s = time.monotonic() - begun
        if not submitting.done():
            submitting.cancel()
            await asyncio.wait({submitting})
            report.problems.append(f"no end within {NO_PROGRESS_S:.0f} s without faults: {ends.awaited[:20]}")
        else:
            submitting.result()
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await api.aclose()
    report.problems += faults.problems
    report.problems += await verdict(stack, submitters.records, effects)
    report.problems += await _broken_invariants(stack)
    await _fill(report, stack, submitters, faults)
    report.retries = api.retries
    return report


async def _quiet(submitting: "asyncio.Task[None]", ends: Ends) -> None:
    """Until everything has ended, or nothing ends any more."""
    quiet_since = time.monotonic()
    while not submitting.done():
        await asyncio.wait({submitting}, timeout=1.0)
        if time.monotonic() > max(ends.progress_at, quiet_since) + NO_PROGRESS_S:
            return


async def _broken_invariants(stack: Stack) -> list[str]:
    """What `sandfleet invariants` finds when whatever had to follow has had the time for it."""
    deadline = time.monotonic() + 2 * GONE_S
    while True:
        found = (await check_stack(stack.info)).violations
        if not found or time.monotonic() > deadline:
            return [f"invariant: {violation.rule}: {violation.id}: {violation.detail}" for violation in found]
        await asyncio.sleep(1.0)


async def _fill(report: Report, stack: Stack, submitters: Submitters, faults: Faults) -> None:
    accepted = [accepted for record in submitters.records for accepted in record.accepted]
    report.runs, report.threads = len(accepted), len(submitters.records)
    followers = [a.follower for a in accepted if a.follower is not None]
    report.streams, report.connections = len(followers), sum(f.connections for f in followers)
    report.faults, report.deaths = faults.carried_out, faults.deaths
    async with await psycopg.AsyncConnection.connect(stack.info.database_url) as connection:
        cursor = await connection.execute(
            "select run_id::text, status, attempt, error->>'error' from runs where run_id = any(%s::uuid[])",
            ([a.run_id for a in accepted if a.run_id],),
        )
        rows = await cursor.fetchall()
    report.statuses = Counter(f"{status} ({error})" if error else status for _, status, _, error in rows)
    report.statuses["undone"] = len(accepted) - len(rows)
    report.attempts = Counter(attempt for _, _, attempt, _ in rows)


def _counts(counter: "Counter[str]") -> str:
    return ", ".join(f"{name} {count}" for name, count in counter.items() if count) or "none"
