"""Step scaling of a pool by how long its first run has waited, for an executor or for a sandbox's room.

The scaler publishes the figures once a minute, and these alarms act on them: out at once and in steps, in slowly and one by
one. On an emulator, which has no scaling policies, an alarm tells the scaler, which sets the counts. With fast scaling the scaler
does so by itself, and there are no alarms on AWS: it would be called while it is at work.
"""

from typing import Final

from aws_cdk import Duration, Fn
from aws_cdk import aws_applicationautoscaling as application
from aws_cdk import aws_autoscaling as autoscaling
from aws_cdk import aws_cloudwatch as cloudwatch
from aws_cdk import aws_cloudwatch_actions as actions
from aws_cdk import aws_sns as sns
from constructs import Construct

from sandfleet.infra_cdk.emulated import Emulator
from sandfleet.infra_cdk.executors import Executors
from sandfleet.infra_cdk.hosts import Hosts
from sandfleet.infra_cdk.metrics import Metrics

AGE_S: Final = 5
"""How long the first run has waited, for an executor or for a sandbox's room, when a pool grows."""
STEPS: Final = ((0, 15, 1), (15, 55, 2), (55, None, 4))
"""(from, to, executors or hosts more), in seconds beyond `AGE_S`."""
IDLE_MINUTES: Final = 10
"""So long must a pool have more room than an executor has slots before it shrinks by one."""
SHRINK_PAUSE: Final = Duration.minutes(5)
"""Between two executors or hosts fewer: what has just been asked to go runs out of work first."""


class PoolScaling(Construct):
    """The alarms of one pool and what they do."""

    def __init__(
        self,
        scope: Construct,
        id: str,
        pool: str,
        fleet: Executors | Hosts,
        slots: int,
        metrics: Metrics,
        topic: sns.Topic,
        emulator: Emulator,
        *,
        by_policies: bool,
    ) -> None:
        super().__init__(scope, id)
        grow = cloudwatch.Alarm(
            self,
            "Grow",
            alarm_description=f"Runs of the pool {pool} are ready and no executor takes them, or wait for a sandbox's room.",
            metric=metrics.of_pool("OldestWait", pool),
            threshold=AGE_S,
            comparison_operator=cloudwatch.ComparisonOperator.GREATER_THAN_OR_EQUAL_TO_THRESHOLD,
            evaluation_periods=1,
            treat_missing_data=cloudwatch.TreatMissingData.IGNORE,
        )
        shrink = cloudwatch.Alarm(
            self,
            "Shrink",
            alarm_description=f"The pool {pool} has had more room than an executor for {IDLE_MINUTES} minutes.",
            metric=metrics.of_pool("FreeSlots", pool, "Minimum"),
            threshold=slots,
            comparison_operator=cloudwatch.ComparisonOperator.GREATER_THAN_THRESHOLD,
            evaluation_periods=IDLE_MINUTES,
            treat_missing_data=cloudwatch.TreatMissingData.NOT_BREACHING,
        )
        if not by_policies:  # the scaler sets the counts itself, and two would pull at them
            for alarm in (grow, shrink):
                alarm.add_alarm_action(actions.SnsAction(topic))
                resource = alarm.node.default_child
                assert isinstance(resource, cloudwatch.CfnAlarm)
                resource.cfn_options.condition = emulator.yes
            return
        policies = (
            self._service_policies(fleet) if isinstance(fleet, Executors) else self._group_policies(fleet)
        )
        for alarm, policy in zip((grow, shrink), policies, strict=True):
            resource = alarm.node.default_child
            assert isinstance(resource, cloudwatch.CfnAlarm)
            action = Fn.condition_if(emulator.no.logical_id, policy, topic.topic_arn)
            resource.add_property_override("AlarmActions", [action])

    def _service_policies(self, fleet: Executors) -> tuple[str, str]:
        target = application.ScalableTarget(
            self,
            "Target",
            service_namespace=application.ServiceNamespace.ECS,
            scalable_dimension="ecs:service:DesiredCount",
            resource_id=f"service/{fleet.service.cluster.cluster_name}/{fleet.service.service_name}",
            min_capacity=fleet.least,
            max_capacity=fleet.most,
        )
        out = application.StepScalingAction(
            self,
            "Out",
            scaling_target=target,
            adjustment_type=application.AdjustmentType.CHANGE_IN_CAPACITY,
            cooldown=Duration.seconds(60),  # Fargate starts a task in 30 to 60 s
            metric_aggregation_type=application.MetricAggregationType.MAXIMUM,
        )
        for lower, upper, change in STEPS:
            out.add_adjustment(adjustment=change, lower_bound=lower, upper_bound=upper)
        into = application.StepScalingAction(
            self,
            "In",
            scaling_target=target,
            adjustment_type=application.AdjustmentType.CHANGE_IN_CAPACITY,
            cooldown=SHRINK_PAUSE,
        )
        into.add_adjustment(adjustment=-1, lower_bound=0)
        return out.scaling_policy_arn, into.scaling_policy_arn

    def _group_policies(self, fleet: Hosts) -> tuple[str, str]:
        out = autoscaling.StepScalingAction(
            self,
            "Out",
            auto_scaling_group=fleet.group,
            adjustment_type=autoscaling.AdjustmentType.CHANGE_IN_CAPACITY,
            estimated_instance_warmup=Duration.seconds(120),  # a host starts in some 90 s
            metric_aggregation_type=autoscaling.MetricAggregationType.MAXIMUM,
        )
        for lower, upper, change in STEPS:
            out.add_adjustment(adjustment=change, lower_bound=lower, upper_bound=upper)
        # Simple scaling: of a group's policies it alone knows a cooldown, and an alarm that stays on acts every minute.
        into = autoscaling.CfnScalingPolicy(
            self,
            "In",
            auto_scaling_group_name=fleet.group.auto_scaling_group_name,
            policy_type="SimpleScaling",
            adjustment_type="ChangeInCapacity",
            scaling_adjustment=-1,
            cooldown=str(SHRINK_PAUSE.to_seconds()),
        )
        return out.scaling_policy_arn, into.attr_arn
