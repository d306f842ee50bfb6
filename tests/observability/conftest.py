"""A stack that traces to a collector of the tests, with two executors' worth of faults and a project to watch."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
from langgraph_sdk import get_client
from langgraph_sdk.client import LangGraphClient
from prometheus_client.parser import text_string_to_metric_families

from sandfleet.localstack.stack import Stack
from tests.fixtures_stack import start_stack
from tests.observability.collector import Collector

PROJECT = Path(__file__).parent.parent / "projects" / "observed" / "langgraph.json"
PRICES = '{"scripted": {"input": 1000, "output": 2000}}'


@pytest.fixture(scope="package")
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture(scope="package")
async def stack(engine: str, collector: Collector) -> AsyncIterator[Stack]:
    """The stack that these tests watch."""
    started = await start_stack(
        engine,
        "observed",
        project=PROJECT,
        SANDFLEET_OTLP_ENDPOINT=collector.url,
        OTEL_BSP_SCHEDULE_DELAY="100",
        SANDFLEET_PRICES=PRICES,
        SANDFLEET_METRICS_TENANTS="2",
    )
    yield started
    assert await started.stop() == []


@pytest.fixture(scope="package")
async def client(stack: Stack) -> AsyncIterator[LangGraphClient]:
    async with get_client(url=stack.info.api_url, api_key=stack.info.api_key) as client:
        yield client


class Scraped:
    """All samples of a process's metrics at one moment."""

    def __init__(self, text: str) -> None:
        self._samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def __call__(self, name: str, **labels: str) -> float:
        """The sum of the samples of this name that have these labels."""
        wanted = labels.items()
        return sum(v for (n, of), v in self._samples.items() if n == name and wanted <= dict(of).items())

    def labels(self, name: str, label: str) -> set[str]:
        """The values that a label has."""
        return {dict(of)[label] for n, of in self._samples if n == name}


async def scrape(stack: Stack, process: str) -> Scraped:
    """Ask a process for its metrics."""
    async with httpx.AsyncClient(trust_env=False) as http:
        answer = await http.get(stack.info.metrics_urls[process], timeout=30)
    return Scraped(answer.raise_for_status().text)
