"""What the scaler, the sweeper and the consumer of dead permits publish, by the names that they give it."""

from typing import Final

from aws_cdk import Duration
from aws_cdk import aws_cloudwatch as cloudwatch

NAMESPACE: Final = "sandfleet"
MINUTE: Final = Duration.minutes(1)


class Metrics:
    """Of one deployment: others may be in the same account and region, and none may scale or alarm another."""

    def __init__(self, deployment: str) -> None:
        self.deployment = deployment

    def of_pool(self, name: str, pool: str, statistic: str = "Maximum") -> cloudwatch.Metric:
        """A figure of a pool."""
        return self._of(name, statistic, Pool=pool)

    def of_service(self, name: str, service: str, statistic: str = "Maximum") -> cloudwatch.Metric:
        """A figure that a function publishes of the deployment as a whole."""
        return self._of(name, statistic, service=service)

    def _of(self, name: str, statistic: str, **dimensions: str) -> cloudwatch.Metric:
        return cloudwatch.Metric(
            namespace=NAMESPACE,
            metric_name=name,
            dimensions_map={"Deployment": self.deployment, **dimensions},
            statistic=statistic,
            period=MINUTE,
        )
