"""The budget of database connections: at its largest, a deployment must stay below ``max_connections``.

Whoever comes last would be refused otherwise, and that may be the executor that renews leases.
"""

import math
from collections.abc import Mapping

from sandfleet.infra_cdk.deployment import Deployment, WrongContext
from sandfleet.infra_cdk.sizes import Size

EXECUTOR_POOL = 8
"""``SANDFLEET_EXECUTOR_POOL_SIZE`` of an executor."""
EXECUTOR_OWN = 3
"""Connections beside its pool: the control loop's, the writer's, and one that is being replaced."""
EXECUTOR_PROCESSES = 2
"""An executor, and the process of its own for runs that may kill it."""
GATEWAY_POOL = 10
"""``SANDFLEET_API_POOL_SIZE`` of a gateway."""
HOST_CONNECTIONS = 4
"""Of a sandbox host: its heartbeat's, and a pool for snapshots."""
FUNCTION_CONCURRENCY: Mapping[str, int] = {"Sweeper": 1, "DeadLetters": 2, "Scaler": 1}
"""Reserved concurrency of each scheduled function; a call has one connection."""
RESERVED = 15
"""For the migration, operators, and what RDS keeps for itself."""

GATEWAYS_MAX_PERCENT = 200
"""Tasks that ECS may run during a deployment, in percent of those wanted."""


def _during_deployment(tasks: int, percent: int) -> int:
    return math.floor(tasks * percent / 100)


def demand(deployment: Deployment, size: Size) -> dict[str, int]:
    """Most connections of each part at once, deployments included."""
    executor = EXECUTOR_PROCESSES * (EXECUTOR_POOL + EXECUTOR_OWN)
    functions = size.api_concurrency * size.api_pool + sum(FUNCTION_CONCURRENCY.values())
    proxy = math.ceil(size.database_max_connections * size.proxy_percent / 100)
    parts = {
        "gateways": GATEWAY_POOL * _during_deployment(size.gateways[1], GATEWAYS_MAX_PERCENT),
        "reserved": RESERVED,
    }
    parts |= {"RDS Proxy": proxy} if size.proxy else {"Lambdas": functions}
    if "default" in deployment.pools:
        parts["executors on Fargate"] = executor * _during_deployment(
            size.executors[1], size.executors_max_percent()
        )
    if deployment.has_hosts:
        # One host more than wanted: a rolling update starts the next before the old one is gone.
        parts["hosts"] = (executor + HOST_CONNECTIONS) * (size.hosts[1] + 1)
    return parts


def check(deployment: Deployment, size: Size) -> None:
    """Raises WrongContext when the sum does not fit."""
    parts = demand(deployment, size)
    total = sum(parts.values())
    if total >= size.database_max_connections:
        listed = ", ".join(f"{name} {count}" for name, count in sorted(parts.items()))
        raise WrongContext(
            f"At maximum scale the size {deployment.size!r} needs {total} database connections ({listed}), and "
            f"database_max_connections is {size.database_max_connections}: lower the maxima in infra_cdk/sizes.py, or "
            "raise it together with the instance class."
        )
