"""The SQS queues of each pool: one queue, and one dead-letter queue for permits that nobody could use."""

import json
from collections.abc import Iterable

from sandfleet.localstack.aws_client import aws_client

# A permit is received once per executor death; past this many the run is poison and PostgreSQL has ended it.
MAX_RECEIVES = 20


async def create_queues(
    endpoint_url: str, region: str, env: dict[str, str], pools: Iterable[str], prefix: str
) -> dict[str, str]:
    """Create the queues ``{prefix}-{pool}`` and ``{prefix}-{pool}-dead`` and return the queue URL of each pool.

    Creating a queue that exists changes nothing.
    """
    urls = {}
    async with aws_client("sqs", endpoint_url, region, env) as sqs:
        for pool in pools:
            # 14 days, the longest that SQS keeps a message: somebody should look at a dead permit.
            dead = await sqs.create_queue(
                QueueName=f"{prefix}-{pool}-dead", Attributes={"MessageRetentionPeriod": "1209600"}
            )
            arn = await sqs.get_queue_attributes(QueueUrl=dead["QueueUrl"], AttributeNames=["QueueArn"])
            redrive = {
                "deadLetterTargetArn": arn["Attributes"]["QueueArn"],
                "maxReceiveCount": str(MAX_RECEIVES),
            }
            queue = await sqs.create_queue(
                QueueName=f"{prefix}-{pool}",
                Attributes={
                    "VisibilityTimeout": "60",
                    "ReceiveMessageWaitTimeSeconds": "20",
                    "RedrivePolicy": json.dumps(redrive),
                },
            )
            urls[pool] = str(queue["QueueUrl"])
    return urls
