"""What a sandbox host counts and times for Prometheus. No label names a tenant, a user or a run."""

from prometheus_client import Counter, Gauge, Histogram

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

SANDBOXES = Gauge(
    "sandfleet_sandboxes",
    "Sandboxes by state: running, starting, warm, removing.",
    ["state"],
)
ROOM = Gauge("sandfleet_room", "How many more sandboxes of a template fit.", ["template"])
DRAINING = Gauge("sandfleet_draining", "1 while the host takes no new sandboxes.")
DATABASE_AGE = Gauge(
    "sandfleet_database_age_seconds",
    "Time since PostgreSQL has answered the host's beat.",
)
ACQUIRES = Histogram(
    "sandfleet_acquire_seconds",
    "Time to a run's new sandbox, by whether it was warm or cold.",
    ["kind"],
    buckets=_SECONDS,
)
KILLS = Counter(
    "sandfleet_kills",
    "Kills by rung of the ladder: 1 the tree, 2 all in the sandbox, 3 from outside.",
    ["rung"],
)
LOST = Counter("sandfleet_sandboxes_lost", "Sandboxes that ended by themselves.")
ENGINE_CALLS = Histogram(
    "sandfleet_engine_call_seconds",
    "Time that the container engine takes for a call, by the call, without the time in the queue.",
    ["call"],
    buckets=_SECONDS,
)
ENGINE_QUEUE = Gauge(
    "sandfleet_engine_queue",
    "Calls to the engine that wait for others to end.",
)
PROXY_REFUSALS = Counter(
    "sandfleet_proxy_refusals",
    "Requests of sandboxes that the forward proxy has refused, by reason.",
    ["reason"],
)
REAPED = Counter(
    "sandfleet_reaped",
    "Things of hosts that are gone that were removed: containers, networks, folders.",
    ["what"],
)
