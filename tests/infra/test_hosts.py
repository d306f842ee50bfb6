"""What the templates say of the machines for sandboxes."""

import json
import re

from sandfleet.infra_cdk.hosts import DRAIN, GROUP, SPOT_NOTICE_S, START
from tests.infra.reading import each, found


def test_a_container_on_a_host_gets_no_answer_from_the_metadata_address(templates):
    """Red when a second hop is allowed, or a request without a token."""
    for name, properties in found(each(templates, "AWS::EC2::LaunchTemplate")):
        options = properties["LaunchTemplateData"]["MetadataOptions"]
        assert (options["HttpTokens"], options["HttpPutResponseHopLimit"]) == ("required", 1), name


def test_a_host_drains_before_it_goes(templates):
    """Red without the lifecycle hook. `test_user_data` runs what the machine does."""
    hooks = [
        p for _, p in each(templates, "AWS::AutoScaling::LifecycleHook") if p["LifecycleHookName"] == "drain"
    ]
    for hook in found(hooks):
        assert hook["LifecycleTransition"] == "autoscaling:EC2_INSTANCE_TERMINATING"
        assert hook["HeartbeatTimeout"] == DRAIN.to_seconds()


def test_a_host_is_in_service_and_replaces_another_once_it_works(templates):
    """Red when a deployment goes on before a machine has said so, or counts one that never does."""
    hooks = [
        p for _, p in each(templates, "AWS::AutoScaling::LifecycleHook") if p["LifecycleHookName"] == "launch"
    ]
    for hook in found(hooks):
        assert hook["LifecycleTransition"] == "autoscaling:EC2_INSTANCE_LAUNCHING"
        assert hook["DefaultResult"] == "ABANDON"
        assert hook["HeartbeatTimeout"] > START.to_seconds()  # the machine's own word comes first
    for template in templates:
        for name, group in template.of_type("AWS::AutoScaling::AutoScalingGroup").items():
            resource = template.body["Resources"][name]
            update = resource["UpdatePolicy"]["AutoScalingRollingUpdate"]
            assert (update["WaitOnResourceSignals"], update["MaxBatchSize"]) == (True, 1)
            assert update["PauseTime"] == f"PT{START.to_minutes() + 5:g}M"
            assert resource["CreationPolicy"]["ResourceSignal"]["Count"] == int(group["MinSize"])
            assert name == GROUP  # what the machine's signal names
            assert group["HealthCheckType"] == "EC2"


def test_a_group_of_spot_machines_has_its_least_on_demand_and_a_choice_of_types(templates):
    """Red when no machine is left while AWS has none of one type to spare."""
    (group,) = [
        p for name, p in each(templates, "AWS::AutoScaling::AutoScalingGroup") if name.startswith("hosts/")
    ]
    policy = group["MixedInstancesPolicy"]
    assert len(policy["LaunchTemplate"]["Overrides"]) >= 3
    assert policy["InstancesDistribution"]["OnDemandBaseCapacity"] == int(group["MinSize"])
    assert policy["InstancesDistribution"]["OnDemandPercentageAboveBaseCapacity"] == 0


def test_machines_may_stand_ready(templates):
    """Red when the context's warm pool is not made, or kept running."""
    ((name, pool),) = found(each(templates, "AWS::AutoScaling::WarmPool"))
    assert name.startswith("both/")
    assert (pool["MinSize"], pool["PoolState"]) == (2, "Stopped")


def test_a_host_has_time_to_drain(templates):
    """Red when the daemon is killed at its grace's end, without a moment for snapshots, or executor and daemon together
    take longer than AWS waits: 5 minutes, or 2 on Spot, of which up to 5 s pass before the machine looks."""
    for name, properties in found(each(templates, "AWS::EC2::LaunchTemplate")):
        spot = name.startswith("hosts/")
        script = json.dumps(properties["LaunchTemplateData"]["UserData"]).replace("\\n", "\n")

        def figure(variable, script=script):
            (value,) = re.findall(rf"(?m)^{variable}='?(\d+)", script)
            return int(value)

        executor_s, host_s = figure("EXECUTOR_STOP_S"), figure("HOST_STOP_S")
        assert executor_s >= figure("SANDFLEET_DRAIN_GRACE_S") + 10, name
        assert host_s >= figure("SANDFLEET_HOST_DRAIN_GRACE_S") + 40, name
        assert executor_s + host_s + 5 <= (SPOT_NOTICE_S if spot else DRAIN.to_seconds() - 30), name
        # systemd kills after the engine does, never before it.
        assert "stop -t $HOST_STOP_S" in script, name
        assert "TimeoutStopSec=$((HOST_STOP_S + 10))" in script, name
        assert "stop -t $EXECUTOR_STOP_S" in script, name
        assert "TimeoutStopSec=$((EXECUTOR_STOP_S + 10))" in script, name


def test_the_daemon_sees_the_machines_control_groups(templates):
    """Red when it has a namespace of its own: it would not find the freezers of its sandboxes."""
    for name, properties in found(each(templates, "AWS::EC2::LaunchTemplate")):
        script = json.dumps(properties["LaunchTemplateData"]["UserData"])
        assert "--privileged --network host --pid host --cgroupns host" in script, name


def test_a_new_host_is_not_taken_before_the_scaler_has_looked_at_it(templates):
    for name, properties in found(each(templates, "AWS::AutoScaling::AutoScalingGroup")):
        assert properties["NewInstancesProtectedFromScaleIn"] is True, name
