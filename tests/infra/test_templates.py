"""What must hold of every template, whatever the size and the kind of fleet."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from sandfleet.infra_cdk import connections
from sandfleet.infra_cdk.deployment import ROOT, read_deployment
from sandfleet.infra_cdk.sizes import SIZES
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
