"""The queue of each pool, and where its permits end that no executor could use."""

from aws_cdk import Duration, RemovalPolicy
from aws_cdk import aws_iam as iam
from aws_cdk import aws_sqs as sqs
from constructs import Construct

MAX_RECEIVES = 20
"""A permit is received once per death of its executor; past the poison limit PostgreSQL has ended the run long since."""


class Queues(Construct):
    """``of[pool]`` and ``dead[pool]``."""

    def __init__(self, scope: Construct, id: str, pools: tuple[str, ...]) -> None:
        super().__init__(scope, id)
        self.of: dict[str, sqs.Queue] = {}
        self.dead: dict[str, sqs.Queue] = {}
        for pool in pools:
            # 14 days, the longest that SQS keeps a message: somebody should look at a dead permit.
            dead = self._queue(f"{pool.capitalize()}Dead", retention_period=Duration.days(14))
            self.dead[pool] = dead
            self.of[pool] = self._queue(
                pool.capitalize(),
                visibility_timeout=Duration.seconds(60),
                receive_message_wait_time=Duration.seconds(20),
                dead_letter_queue=sqs.DeadLetterQueue(queue=dead, max_receive_count=MAX_RECEIVES),
            )

    def _queue(self, id: str, **more: object) -> sqs.Queue:
        return sqs.Queue(
            self,
            id,
            encryption=sqs.QueueEncryption.SQS_MANAGED,
            enforce_ssl=True,
            removal_policy=RemovalPolicy.DESTROY,
            **more,  # type: ignore[arg-type]
        )

    def urls(self) -> dict[str, str]:
        """Queue URL per pool, as ``SANDFLEET_QUEUE_URLS`` wants them."""
        return {pool: queue.queue_url for pool, queue in self.of.items()}

    def grant_send(self, grantee: iam.IGrantable) -> None:
        """Let a process send permits and see how many there are."""
        self._grant(grantee, "sqs:SendMessage", "sqs:GetQueueAttributes")

    def grant_look(self, grantee: iam.IGrantable) -> None:
        """Let a process see how many permits there are."""
        self._grant(grantee, "sqs:GetQueueAttributes")

    def grant_work(self, grantee: iam.IGrantable) -> None:
        """Let an executor take, keep, delete and send permits."""
        self._grant(
            grantee,
            "sqs:SendMessage",
            "sqs:ReceiveMessage",
            "sqs:DeleteMessage",
            "sqs:ChangeMessageVisibility",
            "sqs:GetQueueAttributes",
        )

    def _grant(self, grantee: iam.IGrantable, *actions: str) -> None:
        grantee.grant_principal.add_to_principal_policy(
            iam.PolicyStatement(
                actions=list(actions), resources=[queue.queue_arn for queue in self.of.values()]
            )
        )
