"""``python -m sandfleet.loadtest.bench``: measure sandfleet beside the baseline and print the tables."""

import argparse
import asyncio
import json
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from sandfleet.loadtest.bench import report, standalone
from sandfleet.loadtest.bench.baseline import start as baseline
from sandfleet.loadtest.bench.figures import Figures, figures
from sandfleet.loadtest.bench.loop import Loop, Round, Target

_SHARED_SERVERS = ("postgres", "redis", "provider")
_WARM_UP_RUNS_PER_CLIENT = 2
_WARM_UP_RUNS_AT_LEAST = 20


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m sandfleet.loadtest.bench", description=__doc__)
    parser.add_argument(
        "--dev-json", type=Path, default=Path(".sandfleet/dev.json"), help="file of a running local stack"
    )
    parser.add_argument(
        "--beside",
        type=Path,
        help="dev.json of another stack, of other code or settings, that takes turns too",
    )
    parser.add_argument("--api-url", help="instead of the one in dev.json")
    parser.add_argument("--api-key", help="instead of the one in dev.json")
    parser.add_argument("--concurrency", default="1,10,50,100", help="clients, separated by commas")
    parser.add_argument("--runs", type=int, default=400, help="measured runs per system and concurrency")
    parser.add_argument(
        "--rounds", type=int, default=4, help="turns that the systems take at each concurrency"
    )
    parser.add_argument(
        "--model-delay-ms", type=float, default=0, help="delay before the model's first token"
    )
    parser.add_argument("--assistant", default="hello", help="graph that sandfleet runs")
    parser.add_argument(
        "--agent", type=Path, default=Path("examples/hello.py:graph"), help="the same graph, for the baseline"
    )
    parser.add_argument("--redis-db", type=int, default=15, help="empty Redis database for the baseline")
    parser.add_argument(
        "--only",
        choices=("sandfleet", "baseline"),
        help="measure one of the two; the baseline needs no stack",
    )
    parser.add_argument("--json", type=Path, help="write all figures to this file too")
    return parser.parse_args()


async def _targets(options: argparse.Namespace, stack: AsyncExitStack) -> tuple[list[Target], dict[str, str]]:
    """The systems to measure, started if need be, and the URL of each one's provider."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sandfleet-bench-")))
    targets = []
    provider_urls: dict[str, str] = {}
    if options.only == "baseline" and not options.dev_json.exists():
        own = await stack.enter_async_context(standalone.started(folder))
        database_url, redis_url, provider_url, pids = (
            own.database_url,
            own.redis_url,
            own.provider_url,
            own.pids,
        )
    else:
        try:
            dev: dict[str, Any] = json.loads(options.dev_json.read_text())
        except FileNotFoundError:
            raise SystemExit(
                f"{options.dev_json} is missing: start the stack with `make dev` first."
            ) from None
        database_url, redis_url, provider_url = dev["database_url"], dev["redis_url"], dev["provider_url"]
        pids = {name: pid for name, pid in dev["processes"].items() if name in _SHARED_SERVERS}
        if options.only != "baseline":
            headers = {"x-api-key": options.api_key or dev["api_key"]}
            url = options.api_url or dev["api_url"]
            targets.append(Target("sandfleet", url, headers, dev["processes"], options.assistant))
    if options.beside is not None:
        other: dict[str, Any] = json.loads(options.beside.read_text())
        headers = {"x-api-key": other["api_key"]}
        targets.append(Target("beside", other["api_url"], headers, other["processes"], options.assistant))
        provider_urls["beside"] = other["provider_url"]
    if options.only != "sandfleet":
        targets.append(
            await stack.enter_async_context(
                baseline.started(
                    database_url=database_url,
                    redis_url=redis_url,
                    redis_db=options.redis_db,
                    provider_url=provider_url,
                    agent=options.agent,
                    shared_pids=pids,
                    folder=folder,
                )
            )
        )
    return targets, {target.name: provider_urls.get(target.name, provider_url) for target in targets}


async def _measure(
    loops: Mapping[str, Loop],
    targets: Sequence[Target],
    concurrency: int,
    options: argparse.Namespace,
    out: Console,
) -> list[Figures]:
    """Warm every target up, then let them take turns (A B A B …)."""
    taken: dict[str, list[Round]] = {target.name: [] for target in targets}
    for target in targets:
        runs = max(_WARM_UP_RUNS_AT_LEAST, concurrency * _WARM_UP_RUNS_PER_CLIENT)
        await loops[target.name].round(target, concurrency, runs)
    for number in range(options.rounds):
        for target in targets:
            if out.is_terminal:
                out.print(
                    f"{concurrency} clients, round {number + 1} of {options.rounds}: {target.name} …",
                    style="dim",
                )
            taken[target.name].append(
                await loops[target.name].round(target, concurrency, max(1, options.runs // options.rounds))
            )
    return [figures(name, concurrency, done) for name, done in taken.items()]


async def _bench(options: argparse.Namespace) -> int:
    out = report.console()
    about = report.machine()
    settings = {
        "model delay": f"{options.model_delay_ms:g} ms",
        "runs": f"{options.runs} per system and concurrency in {options.rounds} rounds",
        "baseline": "arq poll_delay 10 ms, max_jobs 100, PostgreSQL pool 20, one API and one worker process",
    }
    results: list[Figures] = []
    async with AsyncExitStack() as stack:
        targets, provider_urls = await _targets(options, stack)
        loops = {name: Loop(url, options.model_delay_ms) for name, url in provider_urls.items()}
        for concurrency in map(int, options.concurrency.split(",")):
            results += await _measure(loops, targets, concurrency, options, out)
    report.print_report(out, results, about, settings)
    if options.json:
        document = {"machine": about, "settings": settings, "results": [asdict(one) for one in results]}
        options.json.write_text(json.dumps(document, indent=2, ensure_ascii=False))
    return 1 if any(one.failures for one in results) else 0


async def _interruptible(options: argparse.Namespace) -> int:
    task = asyncio.create_task(_bench(options))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await task


def main() -> int:
    """Run the benchmark; the exit code is 1 if any run failed."""
    options = _options()
    try:
        import uvloop
    except ImportError:
        return asyncio.run(_interruptible(options))
    return uvloop.run(_interruptible(options))


if __name__ == "__main__":
    sys.exit(main())
