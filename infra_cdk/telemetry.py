"""A collector beside each process, if the context names its image (``images``: ``collector``): spans go to X-Ray, and a choice
of what processes count goes to CloudWatch.

Any distribution of the OpenTelemetry collector will do that has the exporters ``awsxray`` and ``awsemf``, as AWS' own has. It
listens on the loopback address alone, and reads metrics there.
"""

import json
from typing import Final

from aws_cdk import aws_ecs as ecs
from aws_cdk import aws_iam as iam
from aws_cdk import aws_logs as logs
from constructs import Construct

from sandfleet.infra_cdk.deployment import Deployment
from sandfleet.infra_cdk.logs import log_group
from sandfleet.infra_cdk.sizes import Size

NAMESPACE: Final = "sandfleet/processes"
METRICS: Final = "127.0.0.1:9464"
"""Where the process of a task serves its metrics, to its task alone."""
OTLP: Final = "127.0.0.1:4318"
CONFIG: Final = "COLLECTOR_CONFIG"
COMMAND: Final = f"--config=env:{CONFIG}"

COUNTED: Final = {
    ("pool",): ("sandfleet_runs_active", "sandfleet_slots"),
    (): ("sandfleet_model_calls_in_flight", "sandfleet_tool_calls_in_flight"),
    ("stage",): ("sandfleet_run_failures_total",),
    ("status",): (
        "sandfleet_runs_ended_total",
        "sandfleet_model_responses_total",
        "sandfleet_http_responses_total",
    ),
    ("state",): ("sandfleet_run_sandboxes", "sandfleet_sandboxes"),
    ("tenant",): ("sandfleet_cost_usd_total",),
    ("tenant", "kind"): ("sandfleet_tokens_total",),
}
"""Labels → metrics that become CloudWatch's, where each combination of labels costs: others stay within the process."""


class Telemetry(Construct):
    """``environment`` for processes that have a collector beside them; empty without one."""

    def __init__(self, scope: Construct, id: str, deployment: Deployment, size: Size) -> None:
        super().__init__(scope, id)
        self.image = deployment.images.get("collector", "")
        self._deployment = deployment
        self.environment = {"SANDFLEET_METRICS_LISTEN": METRICS}
        self._logs: logs.LogGroup | None = None
        if self.image:
            self.environment["SANDFLEET_OTLP_ENDPOINT"] = f"http://{OTLP}"
            self._logs = log_group(self, "Logs", size)
        elif deployment.otlp_endpoint:
            self.environment["SANDFLEET_OTLP_ENDPOINT"] = deployment.otlp_endpoint

    def beside(self, task: ecs.TaskDefinition) -> None:
        """Add a collector to a task. Its end does not end the task."""
        if self._logs is None:
            return
        task.add_container(
            "collector",
            image=ecs.ContainerImage.from_registry(self.image),
            command=[COMMAND],
            environment={CONFIG: self.config((METRICS,))},
            essential=False,
            logging=ecs.LogDrivers.aws_logs(stream_prefix="collector", log_group=self._logs),
            readonly_root_filesystem=True,
            memory_reservation_mib=64,
        )
        self.grant(task.task_role)

    def grant(self, role: iam.IRole) -> None:
        """Let a collector send what it has."""
        if self._logs is None:
            return
        self._logs.grant_write(role)
        role.add_to_principal_policy(
            iam.PolicyStatement(
                actions=["xray:PutTraceSegments", "xray:PutTelemetryRecords"], resources=["*"]
            )
        )
        role.add_to_principal_policy(
            iam.PolicyStatement(
                actions=["logs:DescribeLogGroups", "logs:DescribeLogStreams"],
                resources=[self._logs.log_group_arn],
            )
        )

    def config(self, scraped: tuple[str, ...]) -> str:
        """The collector's configuration, as JSON, which is YAML."""
        assert self._logs is not None
        declared = [
            {
                "dimensions": [["deployment", *labels]],
                "metric_name_selectors": [f"^{name}$" for name in names],
            }
            for labels, names in COUNTED.items()
        ]
        exported = {
            "namespace": NAMESPACE,
            "log_group_name": self._logs.log_group_name,
            "log_stream_name": "metrics-{TaskId}",
            "dimension_rollup_option": "NoDimensionRollup",
            "metric_declarations": declared,
        }
        targets = [{"targets": list(scraped), "labels": {"deployment": self._deployment.name}}]
        return json.dumps(
            {
                "receivers": {
                    "otlp": {"protocols": {"http": {"endpoint": OTLP}}},
                    "prometheus": {
                        "config": {
                            "scrape_configs": [
                                {
                                    "job_name": "sandfleet",
                                    "scrape_interval": "60s",
                                    "static_configs": targets,
                                }
                            ]
                        }
                    },
                },
                "processors": {"batch": {"timeout": "5s"}},
                "exporters": {"awsxray": {}, "awsemf": exported},
                "service": {
                    "pipelines": {
                        "traces": {
                            "receivers": ["otlp"],
                            "processors": ["batch"],
                            "exporters": ["awsxray"],
                        },
                        "metrics": {
                            "receivers": ["prometheus"],
                            "processors": ["batch"],
                            "exporters": ["awsemf"],
                        },
                    }
                },
            }
        )
