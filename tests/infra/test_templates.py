"""What must hold of every template, whatever the size and the kind of fleet."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from sandfleet.infra_cdk.hosts import DRAIN, SPOT_NOTICE_S
from sandfleet.infra_cdk.network import HOST_PORT
from sandfleet.infra_cdk.wildcards import REASONS

SNAPSHOT = Path(__file__).parent / "resources.json"


def each(templates, kind):
    return [
        (f"{template.name}/{logical_id}", properties)
        for template in templates
        for logical_id, properties in template.of_type(kind).items()
    ]


def found(resources):
    assert resources, "the templates have none: this test would prove nothing"
    return resources


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


def test_no_wildcard_without_a_written_reason(templates):
    """Red when a role may do something to all resources of a kind and infra_cdk/wildcards.py does not say why."""
    seen = set()
    for kind in (
        "AWS::IAM::Policy",
        "AWS::IAM::Role",
        "AWS::S3::BucketPolicy",
        "AWS::SQS::QueuePolicy",
        "AWS::SNS::TopicPolicy",
    ):
        for name, properties in each(templates, kind):
            for statement in statements(properties):
                actions = listed(statement["Action"])
                assert statement["Effect"] == "Deny" or not [a for a in actions if "*" in a], (name, actions)
                if statement["Effect"] == "Allow" and any(
                    "*" in json.dumps(r) for r in listed(statement.get("Resource", []))
                ):
                    assert set(actions) <= REASONS.keys(), (name, actions)
                    seen |= set(actions)
    assert seen, "no wildcard at all: the reasons can go"


def statements(properties):
    documents = [
        properties.get("PolicyDocument"),
        *(p["PolicyDocument"] for p in properties.get("Policies", [])),
    ]
    return [statement for document in documents if document for statement in document["Statement"]]


def listed(value):
    return value if isinstance(value, list) else [value]


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
    (template,) = [t for t in templates if t.name == "both/sandfleet-data"]
    kept = {r["Type"]: r.get("DeletionPolicy") for r in template.body["Resources"].values()}
    assert (kept["AWS::RDS::DBInstance"], kept["AWS::S3::Bucket"]) == ("Snapshot", "Retain")


def test_a_container_on_a_host_gets_no_answer_from_the_metadata_address(templates):
    """Red when a second hop is allowed, or a request without a token."""
    for name, properties in found(each(templates, "AWS::EC2::LaunchTemplate")):
        options = properties["LaunchTemplateData"]["MetadataOptions"]
        assert (options["HttpTokens"], options["HttpPutResponseHopLimit"]) == ("required", 1), name


def test_a_host_drains_before_it_goes(templates):
    """Red without the lifecycle hook, or when the machine does not watch for it."""
    for name, properties in found(each(templates, "AWS::AutoScaling::LifecycleHook")):
        assert properties["LifecycleTransition"] == "autoscaling:EC2_INSTANCE_TERMINATING", name
        assert properties["HeartbeatTimeout"] == DRAIN.to_seconds(), name
    for name, properties in found(each(templates, "AWS::EC2::LaunchTemplate")):
        script = json.dumps(properties["LaunchTemplateData"]["UserData"])
        assert "complete-lifecycle-action" in script, name
        assert "spot/instance-action" in script, name


def test_a_host_has_time_to_drain(templates):
    """Red when the daemon is killed at its grace's end, without a moment for snapshots, or executor and daemon together
    take longer than AWS waits: 5 minutes, or 2 on Spot, of which up to 5 s pass before the machine looks."""
    for name, properties in found(each(templates, "AWS::EC2::LaunchTemplate")):
        spot = "InstanceMarketOptions" in properties["LaunchTemplateData"]
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
    assert {
        "InstanceMarketOptions" in p["LaunchTemplateData"]
        for _, p in each(templates, "AWS::EC2::LaunchTemplate")
    } == {
        True,
        False,
    }


def test_the_daemon_sees_the_machines_control_groups(templates):
    """Red when it has a namespace of its own: it would not find the freezers of its sandboxes."""
    for name, properties in found(each(templates, "AWS::EC2::LaunchTemplate")):
        script = json.dumps(properties["LaunchTemplateData"]["UserData"])
        assert "--privileged --network host --pid host --cgroupns host" in script, name


def test_a_new_host_is_not_taken_before_the_scaler_has_looked_at_it(templates):
    for name, properties in found(each(templates, "AWS::AutoScaling::AutoScalingGroup")):
        assert properties["NewInstancesProtectedFromScaleIn"] is True, name


def test_who_asks_hosts_for_sandboxes_reaches_them(templates):
    """Red when the gateway, or an executor on Fargate, has no way to the hosts' port."""
    for template in templates:
        if template.name.endswith("-data"):
            sources = {
                re.sub(r"[0-9A-F]{8}$", "", rule["SourceSecurityGroupId"]["Fn::GetAtt"][0])
                for rule in template.of_type("AWS::EC2::SecurityGroupIngress").values()
                if rule["FromPort"] == HOST_PORT
            }
            assert sources == {"NetworkGateway", "NetworkExecutors"}


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
    """Red when one of them goes: age of ready runs, the scaler's silence, dead permits, the oldest transaction."""
    for template in templates:
        if template.name.endswith("-app"):
            metrics = {
                alarm.get("MetricName") for alarm in template.of_type("AWS::CloudWatch::Alarm").values()
            }
            assert {"OldestReadyAge", "OldestTransactionAge", "DatabaseConnections", "FreeSlots"} <= metrics


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
