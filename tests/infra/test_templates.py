"""What must hold of every template, whatever the size and the kind of fleet."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from sandfleet.functions.scaler.figures import figures_of
from sandfleet.infra_cdk import connections
from sandfleet.infra_cdk.deployment import ROOT, read_deployment
from sandfleet.infra_cdk.hosts import DRAIN, GROUP, SPOT_NOTICE_S, START
from sandfleet.infra_cdk.scaling import AGE_S, SHRINK_PAUSE, STEPS
from sandfleet.infra_cdk.sizes import SIZES
from sandfleet.shared.scaling.decision import Load
from sandfleet.shared.scaling.latencies import _PERCENTILES, _STAGES
from tests.infra.conftest import CONTEXTS, LARGE, read_templates
from tests.infra.reading import each, found, listed

SNAPSHOT = Path(__file__).parent / "resources.json"


def test_the_templates_have_the_resources_that_they_had(templates):
    """A reviewer sees what a change adds and removes. After a change that is meant: write the printed object to the file."""
    counted = {
        template.name: dict(sorted(Counter(r["Type"] for r in template.body["Resources"].values()).items()))
        for template in templates
    }
    assert counted == json.loads(SNAPSHOT.read_text()), json.dumps(counted, indent=2)


def test_every_queue_is_encrypted_and_has_a_dead_letter_queue(templates):
    """Red without either on any queue; the dead-letter queues themselves are the only exception."""
    queues = found(each(templates, "AWS::SQS::Queue"))
    dead = {
        json.dumps(properties["RedrivePolicy"]["deadLetterTargetArn"]["Fn::GetAtt"][0])
        for _, properties in queues
        if "RedrivePolicy" in properties
    }
    for name, properties in queues:
        assert properties.get("SqsManagedSseEnabled") or properties.get("KmsMasterKeyId"), name
        assert "RedrivePolicy" in properties or json.dumps(name.rpartition("/")[2]) in dead, name


def test_every_queue_has_an_alarm_on_its_age_or_on_what_is_dead_in_it(templates):
    """Red when a pool's queue is added without its alarms."""
    for template in templates:
        watched = {
            dimension["Value"]["Fn::GetAtt"][0]
            for alarm in template.of_type("AWS::CloudWatch::Alarm").values()
            for dimension in alarm.get("Dimensions", [])
            if dimension["Name"] == "QueueName"
        }
        assert set(template.of_type("AWS::SQS::Queue")) == watched


def test_no_data_store_can_be_reached_from_outside(templates):
    """Red when a database is public, a bucket does not block public access, or a group of data lets an address in."""
    for name, properties in found(each(templates, "AWS::RDS::DBInstance")):
        assert not properties.get("PubliclyAccessible"), name
    for name, properties in found(each(templates, "AWS::S3::Bucket")):
        assert set(properties["PublicAccessBlockConfiguration"].values()) == {True}, name
    for name, properties in found(each(templates, "AWS::EC2::SecurityGroupIngress")):
        assert "SourceSecurityGroupId" in properties, name
        assert not {"CidrIp", "CidrIpv6"} & properties.keys(), name
    for name, properties in found(each(templates, "AWS::EC2::SecurityGroup")):
        assert not properties.get("SecurityGroupIngress"), name
    for name, properties in found(each(templates, "AWS::ElasticLoadBalancingV2::LoadBalancer")):
        assert properties["Scheme"] == "internal", name


def test_data_is_encrypted_at_rest_and_on_its_way(templates):
    """Red without any of them."""
    for kind in ("AWS::RDS::DBCluster", "AWS::RDS::DBInstance"):
        for name, properties in found(each(templates, kind)):
            assert properties.get("StorageEncrypted") or "DBClusterIdentifier" in properties, name
            if "DBClusterIdentifier" not in properties or kind == "AWS::RDS::DBCluster":
                assert properties["EnableIAMDatabaseAuthentication"] is True, name
                assert properties["ManageMasterUserPassword"] is True, name
    for name, properties in found(each(templates, "AWS::ElastiCache::ReplicationGroup")):
        assert properties["AtRestEncryptionEnabled"] is True, name
        assert properties["TransitEncryptionEnabled"] is True, name
        assert properties["ClusterMode"] == "disabled", name
        assert "AuthToken" in properties, name
    for name, properties in found(each(templates, "AWS::RDS::DBProxy")):
        assert properties["RequireTLS"] is True, name


def test_a_database_that_is_kept_is_protected_backed_up_and_doubled(templates):
    """Red when the size small could lose its data."""
    (database,) = [p for name, p in each(templates, "AWS::RDS::DBInstance") if name.startswith("both/")]
    assert (database["DeletionProtection"], database["MultiAZ"]) == (True, True)
    assert database["BackupRetentionPeriod"] >= 7
    kept = deletion_policies(templates, "both/sandfleet-data")
    assert (kept["AWS::RDS::DBInstance"], kept["AWS::S3::Bucket"]) == ("Snapshot", "Retain")


def test_the_size_dev_leaves_nothing_also_if_it_was_protected(templates):
    """Red when protection, which is taken off before, decides what stays."""
    (cluster,) = [p for name, p in each(templates, "AWS::RDS::DBCluster") if name.startswith("hosts/")]
    assert cluster["DeletionProtection"] is True
    kept = deletion_policies(templates, "hosts/sandfleet-data")
    assert (kept["AWS::RDS::DBCluster"], kept["AWS::S3::Bucket"]) == ("Delete", "Delete")


def deletion_policies(templates, name):
    (template,) = [t for t in templates if t.name == name]
    return {r["Type"]: r.get("DeletionPolicy") for r in template.body["Resources"].values()}


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


def test_deploy_md_tells_how_much_concurrency_is_reserved(templates):
    """Red when a function's is changed and not what an account needs."""
    told = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text()
    for template in templates:
        reserved = sum(
            p["ReservedConcurrentExecutions"] for p in template.of_type("AWS::Lambda::Function").values()
        )
        if reserved:
            size = {"both": "small", "hosts": "dev"}[template.name.partition("/")[0]]
            assert re.search(rf"\b{reserved} with(?: the size)? `{size}`", told), (size, reserved)


def test_every_log_group_forgets(templates):
    """Red without a retention, or when something writes to a group that is not in the template."""
    for name, properties in found(each(templates, "AWS::Logs::LogGroup")):
        assert properties["RetentionInDays"] <= 90, name
    for name, properties in found(each(templates, "AWS::Lambda::Function")):
        assert "LogGroup" in properties["LoggingConfig"], name
    for name, properties in found(each(templates, "AWS::ECS::TaskDefinition")):
        for container in properties["ContainerDefinitions"]:
            assert "Ref" in container["LogConfiguration"]["Options"]["awslogs-group"], name


def test_alarms_reach_people_or_scaling(templates):
    """Red when an alarm has no action, or one for people does not say when it is over, or where to read what to do."""
    runbook = (Path(__file__).parents[2] / "docs" / "runbook.md").read_text()
    places = {heading.lower() for heading in re.findall(r"^## (\w+)$", runbook, re.MULTILINE)}
    places |= set(re.findall(r'<a id="(\w+)"></a>', runbook))
    for name, properties in found(each(templates, "AWS::CloudWatch::Alarm")):
        assert properties["AlarmActions"], name
        if "/Scale" not in name:
            assert properties["OKActions"] == properties["AlarmActions"], name
            assert properties["AlarmDescription"].rpartition("docs/runbook.md#")[2].rstrip(".") in places, (
                name
            )
    email = [p for _, p in each(templates, "AWS::SNS::Subscription") if p["Protocol"] == "email"]
    assert [p["Endpoint"] for p in email] == ["a@example.com"]


def test_the_alarms_that_matter_are_there(templates):
    """Red when one of them goes, or watches something else."""
    for template in templates:
        if not template.name.endswith("-app"):
            continue
        deployment, fleet = "sandfleet", template.name.partition("/")[0]
        watched = {
            (
                a["MetricName"],
                a.get("Statistic", a.get("ExtendedStatistic")),
                pool_of(a),
                a["TreatMissingData"],
                a["Threshold"],
            )
            for a in template.of_type("AWS::CloudWatch::Alarm").values()
            if "MetricName" in a
        }
        for pool in {"both": ("default", "hosts"), "hosts": ("hosts",)}[fleet]:
            own = (deployment, pool)
            assert ("OldestReadyAge", "Maximum", own, "notBreaching", 300) in watched  # runs wait
            assert ("OldestReadyAge", "SampleCount", own, "breaching", 1) in watched  # the scaler is silent
            assert ("DeadPermits", "Sum", own, "notBreaching", 1) in watched  # executors die
            assert ("OldestWait", "Maximum", own, "ignore", AGE_S) in watched  # the fleet grows
            assert ("FreeSlots", "Minimum", own, "notBreaching", SIZES[SIZE_OF[fleet]].slots) in watched
        assert ("OldestRoomWait", "Maximum", (deployment, "hosts"), "notBreaching", 300) in watched
        assert ("OldestTransactionAge", "Maximum", (deployment, None), "notBreaching", 120) in watched
        assert "DatabaseConnections" in {name for name, *_ in watched}


def pool_of(alarm):
    """(deployment, pool) that a metric of ours is of."""
    named = {d["Name"]: d["Value"] for d in alarm.get("Dimensions", [])}
    return named.get("Deployment"), named.get("Pool")


SIZE_OF = {name: context["size"] for name, context in CONTEXTS.items()}


def test_the_wait_of_runs_brings_executors_and_hosts_in_steps_and_room_to_spare_takes_them_one_by_one(
    templates,
):
    """Red when an alarm runs another policy, or a policy has other steps than the simulator's."""
    (template,) = [t for t in templates if t.name == "both/sandfleet-app"]
    resources = template.body["Resources"]
    for scale, target in (
        ("ScaleDefault", "AWS::ApplicationAutoScaling"),
        ("ScaleHosts", "AWS::AutoScaling"),
    ):
        actions = {}
        for name, alarm in template.of_type("AWS::CloudWatch::Alarm").items():
            if name.startswith(scale):
                ((_, policy, _),) = [action["Fn::If"] for action in alarm["AlarmActions"]]
                actions[alarm["MetricName"]] = resources[
                    next(iter(policy.values()))[0] if "Fn::GetAtt" in policy else policy["Ref"]
                ]
        grow, shrink = actions["OldestWait"], actions["FreeSlots"]
        assert grow["Type"] == shrink["Type"] == f"{target}::ScalingPolicy"
        out = grow["Properties"].get("StepScalingPolicyConfiguration", grow["Properties"])
        steps = [
            (s["MetricIntervalLowerBound"], s.get("MetricIntervalUpperBound"), s["ScalingAdjustment"])
            for s in out["StepAdjustments"]
        ]
        assert tuple(steps) == STEPS
        into = shrink["Properties"].get("StepScalingPolicyConfiguration", shrink["Properties"])
        (fewer,) = [s["ScalingAdjustment"] for s in into.get("StepAdjustments", [into])]
        assert (fewer, int(into["Cooldown"])) == (-1, SHRINK_PAUSE.to_seconds())


def test_what_is_watched_is_published(templates):
    """Red when alarms or dashboard name a metric of ours, or dimensions, that no function publishes: it would be silent for
    ever."""
    latencies = [f"{stage}P{percent}" for stage in _STAGES for percent in _PERCENTILES]
    load = Load(0.0, 0, 0.0, 0, 0, 0, 0, None)
    published = {
        (name, ("Deployment", "Pool")) for name in figures_of(load, 1, 1, dict.fromkeys(latencies, 0.0))
    }
    published |= {
        ("DeadPermits", ("Deployment", "Pool"))
    }  # held to be so by the function's test, as that of the next
    published |= {
        (name, ("Deployment", "service")) for name in ("OldestTransactionAge", "SweepPasses", "RunsMadeReady")
    }
    watched = set()
    for template in templates:
        for alarm in template.of_type("AWS::CloudWatch::Alarm").values():
            if alarm.get("Namespace") == "sandfleet":
                watched.add((alarm["MetricName"], tuple(sorted(d["Name"] for d in alarm["Dimensions"]))))
        for board in template.of_type("AWS::CloudWatch::Dashboard").values():
            text = "".join(
                part if isinstance(part, str) else "REFERENCE"
                for part in board["DashboardBody"]["Fn::Join"][1]
            )
            for name, dimensions in re.findall(r'\["sandfleet","(\w+)",((?:"[^"]*",?)+)', text):
                names = tuple(sorted(json.loads(f"[{dimensions.rstrip(',')}]")[::2]))
                watched.add((name, names))
    assert watched <= published, watched - published
    assert len(watched) > 8


def test_metrics_have_the_name_of_their_deployment(templates):
    """Red when one has not: another deployment in the same account would scale and alarm this one."""
    for name, alarm in found(each(templates, "AWS::CloudWatch::Alarm")):
        dimensions = {d["Name"]: d["Value"] for d in alarm.get("Dimensions", [])}
        if alarm.get("Namespace") == "sandfleet":
            assert dimensions["Deployment"] == "sandfleet", name
        if alarm.get("Namespace") == "AWS/ApiGateway":
            assert dimensions["ApiName"] == "sandfleet-app", name
    for template in templates:
        for process in template.of_type("AWS::Lambda::Function").values():
            assert process["Environment"]["Variables"]["SANDFLEET_DEPLOYMENT"] == "sandfleet"


def test_executors_have_time_to_drain(templates):
    """Red when Fargate kills before the grace is over, or the daemon cannot be reached by SIGTERM first."""
    executors = [
        container
        for _, properties in found(each(templates, "AWS::ECS::TaskDefinition"))
        for container in properties["ContainerDefinitions"]
        if container["Name"] == "executor"
    ]
    for container in executors:
        variables = {v["Name"]: v["Value"] for v in container["Environment"]}
        assert container["StopTimeout"] == 120
        assert float(variables["SANDFLEET_DRAIN_GRACE_S"]) <= container["StopTimeout"] - 20
        assert container["ReadonlyRootFilesystem"] is True
    assert executors


@pytest.mark.parametrize(
    "setting", ["idle_in_transaction_session_timeout", "max_connections", "rds.force_ssl"]
)
def test_the_database_has_limits_of_its_own(templates, setting):
    """Red without the parameter on RDS or on Aurora."""
    groups = each(templates, "AWS::RDS::DBParameterGroup") + each(
        templates, "AWS::RDS::DBClusterParameterGroup"
    )
    assert len(groups) == 2
    for name, properties in groups:
        assert int(properties["Parameters"][setting]) > 0, name


def test_new_code_serves_after_the_schema_was_migrated(templates):
    """Red when the API, the gateway or the executors are updated beside the migration, not after it."""
    for template in templates:
        resources = template.body["Resources"]
        schema = [
            logical_id
            for logical_id, resource in resources.items()
            if resource["Type"] == "Custom::SandfleetSchema"
        ]
        if not schema:
            continue
        serving = [
            logical_id
            for logical_id, resource in resources.items()
            if resource["Type"] in ("AWS::ECS::Service", "AWS::AutoScaling::AutoScalingGroup")
            or (resource["Type"] == "AWS::Lambda::Function" and "Migrat" not in logical_id)
        ]
        assert len(serving) >= 5
        for logical_id in serving:
            assert schema[0] in listed(resources[logical_id].get("DependsOn", [])), logical_id


def test_a_process_without_a_writable_root_may_write_where_a_volume_is_mounted(templates):
    """Red without VOLUME in the image: ECS would mount a folder of root's, and the process is not root."""
    for _, properties in found(each(templates, "AWS::ECS::TaskDefinition")):
        for container in properties["ContainerDefinitions"]:
            if "MountPoints" not in container:  # the collector writes nothing
                continue
            lines = (
                (ROOT / "infra_cdk" / "images" / f"{container['Name']}.Dockerfile").read_text().splitlines()
            )
            user = next(n for n, line in enumerate(lines) if line.startswith("USER "))
            for path in [mount["ContainerPath"] for mount in container["MountPoints"]]:
                opened, volume = lines.index(f"RUN chmod 1777 {path}"), lines.index(f'VOLUME ["{path}"]')
                assert opened < volume < user, container["Name"]


def test_who_uses_a_part_reaches_it_and_nobody_else_does(templates):
    """Red when a way in goes, or another comes, or one is there twice, which AWS refuses."""
    ways = {("Link", "Balancer", 80), ("Balancer", "Gateway", 8123), ("Functions", "Proxy", 5432)}
    for source in ("Gateway", "Functions", "Executors", "Hosts"):
        ways |= {(source, "Database", 5432), (source, "Cache", 6379)}
    ways |= {(source, "Hosts", 8700) for source in ("Gateway", "Executors", "Hosts")}
    for template in templates:
        if template.name.endswith("-data"):
            rules = [way_in(rule) for rule in template.of_type("AWS::EC2::SecurityGroupIngress").values()]
            proxy = {("Proxy", "Database", 5432)} if template.of_type("AWS::RDS::DBProxy") else set()
            assert sorted(rules) == sorted(ways | proxy), template.name


def way_in(rule):
    """(source, target, port) of a rule; the port of a database may be its own word."""
    source, target = (
        re.fullmatch(r"Network(\w+)[0-9A-F]{8}", rule[key]["Fn::GetAtt"][0])[1]
        for key in ("SourceSecurityGroupId", "GroupId")
    )
    port = rule["ToPort"]
    return source, target, 5432 if isinstance(port, dict) and "Port" in port["Fn::GetAtt"][1] else port


def test_the_budget_of_connections_counts_the_tasks_that_a_deployment_may_run(templates):
    """Red when a service may run more beside each other than `connections.demand` counts."""
    (template,) = [t for t in templates if t.name == "both/sandfleet-app"]
    counted = connections.demand(read_deployment(CONTEXTS["both"]), SIZES["small"])
    executor = connections.EXECUTOR_PROCESSES * (connections.EXECUTOR_POOL + connections.EXECUTOR_OWN)
    for part, each_has, name in (
        ("Executors", executor, "executors on Fargate"),
        ("Gateway", connections.GATEWAY_POOL, "gateways"),
    ):
        ((logical_id, service),) = [
            (k, v) for k, v in template.of_type("AWS::ECS::Service").items() if k.startswith(part)
        ]
        (most,) = [
            target["MaxCapacity"]
            for target in template.of_type("AWS::ApplicationAutoScaling::ScalableTarget").values()
            if logical_id in json.dumps(target["ResourceId"])
        ]
        percent = service["DeploymentConfiguration"]["MaximumPercent"]
        assert counted[name] == each_has * (most * percent // 100), name


def test_one_alone_sets_the_count_of_a_fleet(templates):
    """Red when policies act and the scaler does, too, or neither."""
    modes = set()
    for template in templates:
        policies = [
            logical_id
            for kind in ("AWS::ApplicationAutoScaling::ScalingPolicy", "AWS::AutoScaling::ScalingPolicy")
            for logical_id in template.of_type(kind)
            if not logical_id.startswith("Gateway")
        ]
        for function in template.of_type("AWS::Lambda::Function").values():
            variables = function["Environment"]["Variables"]
            if "SANDFLEET_SCALER_SETS_COUNTS" in variables:
                _, emulated, real = variables["SANDFLEET_SCALER_SETS_COUNTS"]["Fn::If"]
                scaler_sets = real == "true"
                assert emulated == "false"
                for name, resource in template.body["Resources"].items():
                    if name.startswith("Scale") and resource["Type"] == "AWS::CloudWatch::Alarm":
                        assert (resource.get("Condition") == "IsEmulated") is scaler_sets, name
                assert scaler_sets != bool(policies), (template.name, policies)
                modes.add(scaler_sets)
    assert modes == {True, False}


def test_the_largest_deployment_can_be_made_and_may_have_nobody(synthesized):
    """Red when the size large, Aurora behind a proxy, or a least of 0 does not synthesize, or cdk-nag finds something."""
    large = read_templates(synthesized, LARGE)
    assert len(found(each(large, "AWS::RDS::DBCluster"))) == len(found(each(large, "AWS::RDS::DBProxy"))) == 1
    ((_, group),) = each(large, "AWS::AutoScaling::AutoScalingGroup")
    assert (group["MinSize"], group["MaxSize"]) == ("0", str(SIZES["large"].hosts[1]))
    (scaler,) = [p for name, p in each(large, "AWS::Lambda::Function") if "ScheduledScaler" in name]
    assert '\\"least\\":0' in json.dumps(
        scaler["Environment"]["Variables"]["SANDFLEET_SCALER_TARGETS"]
    ).replace(" ", "")


def test_a_deployment_leaves_the_counts_to_scaling(templates):
    """Red when a template sets a count: each deployment would bring a loaded fleet back to it."""
    for name, properties in found(each(templates, "AWS::ECS::Service")):
        assert "DesiredCount" not in properties, name
    for name, properties in found(each(templates, "AWS::AutoScaling::AutoScalingGroup")):
        assert "DesiredCapacity" not in properties, name


def test_the_load_balancer_closes_idle_connections_before_the_gateway_does(templates):
    """Red when the gateway may close one while a request is on its way: the client would get 502."""
    source = (ROOT / "functions" / "api" / "__main__.py").read_text()
    keep_alive_s = int(re.search(r"timeout_keep_alive=(\d+)", source)[1])
    for name, properties in found(each(templates, "AWS::ElasticLoadBalancingV2::LoadBalancer")):
        attributes = {a["Key"]: a["Value"] for a in properties["LoadBalancerAttributes"]}
        assert 15 < int(attributes["idle_timeout.timeout_seconds"]) < keep_alive_s, name


def test_subnets_are_in_as_many_zones_as_the_size_says(templates):
    """Red when CDK gives fewer than the size wants."""
    for template in templates:
        subnets = template.of_type("AWS::EC2::Subnet").values()
        zones = {json.dumps(subnet["AvailabilityZone"]) for subnet in subnets}
        if template.name.startswith("both/") and subnets:
            assert zones == {'"eu-central-1b"', '"eu-central-1c"'}  # those that the context names
        assert not subnets or len(zones) == SIZES[CONTEXTS[template.name.partition("/")[0]]["size"]].zones
    found(each(templates, "AWS::EC2::Subnet"))
