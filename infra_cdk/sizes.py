"""What the three sizes are: plain figures, read by the constructs and by the budget of connections."""

from dataclasses import dataclass, replace
from typing import Final


@dataclass(frozen=True)
class Size:
    """The figures of one size."""

    zones: int
    """Availability zones; a template that names no account knows two."""
    nat_gateways: int
    database_class: str
    """Instance class of RDS PostgreSQL."""
    database_gib: int
    """Storage at the start; it grows to ten times that."""
    database_max_connections: int
    """Set in the parameter group, so that the budget of connections knows it. RDS' own default is one per 9.5 MB."""
    aurora_units: tuple[float, float]
    """Least and most capacity units of Aurora Serverless v2, 2 GiB each."""
    standby: bool
    """A second database instance and cache node in another zone."""
    backup_days: int
    proxy: bool
    """RDS Proxy between the Lambdas and the database. Without one they connect directly."""
    proxy_percent: int
    """Share of the database's connections that the proxy may use."""
    cache_class: str
    api_concurrency: int
    """Reserved concurrency of the API's Lambda: calls beyond it are refused by API Gateway at once."""
    api_pool: int
    """Connections of one Lambda environment."""
    requests_per_s: int
    """API Gateway's steady rate for all callers; bursts may be twice that."""
    executors: tuple[int, int]
    """Least and most Fargate tasks."""
    executor_cpu: int
    """CPU units of a task: one vCPU is 1024, and an executor is one process, so more serves only the graphs' threads."""
    executor_mib: int
    slots: int
    """Runs of an executor at once."""
    gateways: tuple[int, int]
    """Least and most gateway tasks, half a vCPU each."""
    hosts: tuple[int, int]
    """Least and most Docker hosts."""
    host_class: dict[str, str]
    """Instance type per architecture."""
    host_gib: int
    """Root volume: images and the writable layers of sandboxes with a writable root."""
    log_days: int
    fast_scaling: bool
    """Whether the scaler sets counts by itself, unless the context says otherwise: its function works all the time then."""

    def executors_max_percent(self) -> int:
        """Executors that ECS may run during a deployment, in percent of those wanted. ECS rounds down: at 150 a service of one
        task could not start the new one, and would hang."""
        return 200 if self.executors[0] <= 1 else 150

    def from_zero(self) -> "Size":
        """The same with nobody while there is no work. A deployment may then double a fleet, which makes the most smaller, or
        the connections would not do."""
        most = self.executors[1] * self.executors_max_percent() // 200
        return replace(self, executors=(0, most), hosts=(0, self.hosts[1]))


SIZES: Final[dict[str, Size]] = {
    "dev": Size(
        zones=2,
        nat_gateways=1,
        database_class="t4g.medium",
        database_gib=20,
        database_max_connections=400,
        aurora_units=(0.5, 4.0),
        standby=False,
        backup_days=1,
        proxy=False,
        proxy_percent=0,
        cache_class="cache.t4g.micro",
        api_concurrency=20,
        api_pool=2,
        requests_per_s=50,
        executors=(1, 2),
        executor_cpu=1024,
        executor_mib=2048,
        slots=32,
        gateways=(1, 1),
        hosts=(1, 2),
        host_class={"x86_64": "t3.large", "arm64": "t4g.large"},
        host_gib=40,
        log_days=7,
        fast_scaling=False,
    ),
    "small": Size(
        zones=2,
        nat_gateways=1,
        database_class="m7g.large",
        database_gib=100,
        database_max_connections=900,
        aurora_units=(2.0, 16.0),
        standby=True,
        backup_days=7,
        proxy=True,
        proxy_percent=20,
        cache_class="cache.m7g.large",
        api_concurrency=100,
        api_pool=2,
        requests_per_s=500,
        executors=(1, 10),
        executor_cpu=1024,
        executor_mib=4096,
        slots=64,
        gateways=(2, 4),
        hosts=(1, 6),
        host_class={"x86_64": "m7a.xlarge", "arm64": "m7g.xlarge"},
        host_gib=100,
        log_days=30,
        fast_scaling=True,
    ),
    "large": Size(
        zones=2,
        nat_gateways=2,
        database_class="m7g.4xlarge",
        database_gib=500,
        database_max_connections=5000,
        aurora_units=(8.0, 64.0),
        standby=True,
        backup_days=30,
        proxy=True,
        proxy_percent=25,
        cache_class="cache.m7g.xlarge",
        api_concurrency=500,
        api_pool=2,
        requests_per_s=5000,
        executors=(3, 60),
        executor_cpu=1024,
        executor_mib=4096,
        slots=64,
        gateways=(3, 20),
        hosts=(3, 40),
        host_class={"x86_64": "m7a.4xlarge", "arm64": "m7g.4xlarge"},
        host_gib=300,
        log_days=90,
        fast_scaling=True,
    ),
}
