"""What a host tells of itself at /metrics."""

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from sandfleet.fleet.sandbox.client import SandboxClient
from sandfleet.localstack.process import free_port
from tests.sandbox.test_reaper import warm
from tests.waiting import eventually


async def samples(host):
    """All samples by name and labels."""
    url = f"http://{host.env['SANDFLEET_METRICS_LISTEN']}/metrics"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        assert response.status == 200
        text = await response.text()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_metrics_count_what_happens(own_host):
    """Red when a number stands still: sandboxes by state, acquires, kills by rung, engine calls."""
    host = own_host(SANDFLEET_WARM_SANDBOXES="1", SANDFLEET_METRICS_LISTEN=f"127.0.0.1:{free_port()}")
    await host.start()
    await warm(host, 1)
    client = SandboxClient(host.socket)
    first, second = [await host.sandbox(client) for _ in range(2)]
    await first.exec("true")
    assert (await second.exec("sleep 600", timeout_s=0.1)).timed_out

    async def counted():
        found = await samples(host)
        return found if found.get(("sandfleet_sandboxes", "running")) == 2 else None

    found = await eventually(counted, what="both are counted")
    assert found["sandfleet_acquire_seconds_count", "warm"] >= 1
    assert found["sandfleet_kills_total", "1"] == 1
    assert found["sandfleet_engine_call_seconds_count", "POST containers/create"] >= 2
    assert found["sandfleet_engine_queue",] >= 0
    assert found["sandfleet_room", "default"] > 0
    assert found["sandfleet_draining",] == 0
    assert found["sandfleet_database_age_seconds",] < 60
    assert not [key for key in found if "acme" in key or str(first.fence.key.run_id) in key]
    await first.close()
    await second.close()
    await client.aclose()
