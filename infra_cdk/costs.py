"""What a deployment costs by the hour before anybody uses it, from list prices that are inputs: ``python -m sandfleet.infra_cdk.costs``.

Counted is what runs all the time, the scheduled functions and CloudWatch's alarms and metrics among it. What is paid by use is not:
calls of the API, messages, logs, traffic, backups beyond the database's size, snapshots, models.
"""

import argparse
from typing import Final

from sandfleet.infra_cdk.sizes import SIZES, Size

HOURS_PER_MONTH: Final = 730

PRICES: Final[dict[str, float]] = {
    "fargate-vcpu-x86_64": 0.04048,
    "fargate-gb-x86_64": 0.004445,
    "fargate-vcpu-arm64": 0.03238,
    "fargate-gb-arm64": 0.00356,
    "nat": 0.045,
    "load-balancer": 0.0225,
    "db.t4g.medium": 0.065,
    "db.m7g.large": 0.168,
    "db.m7g.4xlarge": 1.344,
    "db-gb-month": 0.115,
    "proxy-vcpu": 0.015,
    "cache.t4g.micro": 0.0128,
    "cache.m7g.large": 0.1264,
    "cache.m7g.xlarge": 0.252,
    "t3.large": 0.0832,
    "m7a.xlarge": 0.23184,
    "m7a.4xlarge": 0.92736,
    "t4g.large": 0.0672,
    "m7g.xlarge": 0.1632,
    "m7g.4xlarge": 0.6528,
    "disk-gb-month": 0.08,
    "aurora-unit": 0.12,
    "aurora-gb-month": 0.10,
    "lambda-gb-s": 0.0000166667,
    "alarm-month": 0.10,
    "metric-month": 0.30,
}
"""US dollars per hour, or per month where the name says so; us-east-1, Linux, on demand, one zone."""

_VCPUS: Final = {"db.t4g.medium": 2, "db.m7g.large": 2, "db.m7g.4xlarge": 16}
_GATEWAY: Final = (0.5, 1.0)  # vCPUs and GB of a task

_ALARMS, _METRICS = 40, 110
"""About as many as a deployment with both fleets has: 20 metrics a pool, and those of Container Insights for two services."""
_FUNCTION_GB = 0.5
_WORKS_S_PER_HOUR: Final = {True: 60 * 58.0, False: 60 * 5.0}
"""Scaler and sweeper together: the scaler evaluates for 55 s of each minute on the fast path, else both are done in some seconds."""

Range = tuple[float, float]


def hourly(size: Size, prices: dict[str, float], architecture: str) -> dict[str, Range]:
    """(least, most) per hour by part. Raises KeyError naming a price that is missing."""
    nodes = 2 if size.standby else 1
    database = f"db.{size.database_class}"
    vcpu, gb = prices[f"fargate-vcpu-{architecture}"], prices[f"fargate-gb-{architecture}"]
    task = vcpu * size.executor_cpu / 1024 + gb * size.executor_mib / 1024
    host = prices[size.host_class[architecture]] + prices["disk-gb-month"] * size.host_gib / HOURS_PER_MONTH
    fixed = {
        "network": prices["nat"] * size.nat_gateways + prices["load-balancer"],
        "database": nodes * (prices[database] + prices["db-gb-month"] * size.database_gib / HOURS_PER_MONTH)
        + (prices["proxy-vcpu"] * _VCPUS[database] if size.proxy else 0.0),
        "cache": nodes * prices[size.cache_class],
        "functions": prices["lambda-gb-s"] * _FUNCTION_GB * _WORKS_S_PER_HOUR[size.fast_scaling],
        "CloudWatch": (prices["alarm-month"] * _ALARMS + prices["metric-month"] * _METRICS) / HOURS_PER_MONTH,
    }
    parts: dict[str, Range] = {name: (value, value) for name, value in fixed.items()}
    parts["gateways"] = _times(vcpu * _GATEWAY[0] + gb * _GATEWAY[1], size.gateways)
    parts["executors"] = _times(task, size.executors)
    parts["hosts"] = _times(host, size.hosts)
    return parts


def aurora(size: Size, prices: dict[str, float]) -> Range:
    """(least, most) per hour of Aurora Serverless v2 instead of RDS; what it reads and writes is paid by use."""
    nodes = 2 if size.standby else 1
    stored = prices["aurora-gb-month"] * size.database_gib / HOURS_PER_MONTH
    # RDS Proxy is paid by the unit there, for eight at least.
    proxy = prices["proxy-vcpu"] * max(8.0, size.aurora_units[0]) if size.proxy else 0.0
    least, most = (nodes * prices["aurora-unit"] * units + stored + proxy for units in size.aurora_units)
    return least, most


def _times(price: float, counts: tuple[int, int]) -> Range:
    return price * counts[0], price * counts[1]


def table(prices: dict[str, float], architecture: str) -> str:
    """The sizes as a table in Markdown, dollars per hour, and the sums per month."""
    found = {name: hourly(size, prices, architecture) for name, size in SIZES.items()}
    lines = [f"| per hour | {' | '.join(found)} |", f"| --- |{' ---: |' * len(found)}"]
    for part in next(iter(found.values())):
        lines.append(f"| {part} | {' | '.join(_shown(parts[part]) for parts in found.values())} |")
    instead = " | ".join(_shown(aurora(size, prices)) for size in SIZES.values())
    lines.append(f"| *Aurora instead of the database above* | {instead} |")
    for kind, left_out in (("fargate", "hosts"), ("hosts", "executors"), ("both", "")):
        sums = [_sum({k: v for k, v in parts.items() if k != left_out}) for parts in found.values()]
        lines.append(f"| **month, fleet `{kind}`** | {' | '.join(_shown(s, 0) for s in sums)} |")
    return "\n".join(lines)


def _sum(parts: dict[str, Range]) -> Range:
    least, most = (sum(part[n] for part in parts.values()) * HOURS_PER_MONTH for n in (0, 1))
    return least, most


def _shown(value: Range, digits: int = 3) -> str:
    least, most = (f"{bound:,.{digits}f}" for bound in value)
    return least if least == most else f"{least} to {most}"


def main() -> None:
    """Print the table; ``--price NAME=DOLLARS`` replaces a price."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--price", action="append", default=[], metavar="NAME=DOLLARS")
    parser.add_argument("--architecture", choices=("x86_64", "arm64"), default="x86_64")
    arguments, prices = parser.parse_args(), dict(PRICES)
    for given in arguments.price:
        name, _, value = given.partition("=")
        if name not in prices:
            parser.error(f"{name} is no price; there are {', '.join(prices)}.")
        prices[name] = float(value)
    print(table(prices, arguments.architecture))  # noqa: T201


if __name__ == "__main__":
    main()
