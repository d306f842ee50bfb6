"""What roles may do: no more than is said, and all that their processes need."""

import json
from collections import Counter

from sandfleet.infra_cdk.wildcards import REASONS
from tests.infra.conftest import CONTEXTS
from tests.infra.reading import each, found, listed, may, processes


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


def test_whoever_is_told_of_a_secret_may_read_it(templates):
    """Red when a function, a task or a host has a secret in its environment that its role may not read: it would end at
    its start."""
    told = Counter()
    for template in templates:
        for process in processes(template):
            for secret in process.secrets:
                assert may(template, process.role, "secretsmanager:GetSecretValue", secret), (process, secret)
                told[process.kind] += 1
    assert set(told) == {"function", "task", "host"}


def test_the_proxy_may_log_in_to_the_database(templates):
    """Red when the proxy's role has no right to: it logs in with tokens, as its clients do."""
    for template in templates:
        for proxy in template.of_type("AWS::RDS::DBProxy").values():
            ((database, _),) = template.of_type("AWS::RDS::DBInstance").items()
            assert proxy["DefaultAuthScheme"] == "IAM_AUTH"
            assert may(
                template,
                proxy["RoleArn"]["Fn::GetAtt"][0],
                "rds-db:connect",
                {"Fn::GetAtt": [database, "DbiResourceId"]},
            )
    found(each(templates, "AWS::RDS::DBProxy"))


def test_images_in_a_private_registry_can_be_pulled(templates):
    """Red when a task's execution role or a host's role may not pull what it is to run."""
    (template,) = [t for t in templates if t.name == "both/sandfleet-app"]
    pulled = []
    for task in template.of_type("AWS::ECS::TaskDefinition").values():
        role = task["ExecutionRoleArn"]["Fn::GetAtt"][0]
        pulled += [(role, container["Image"]) for container in task["ContainerDefinitions"]]
    (host,) = [process for process in processes(template) if process.kind == "host"]
    pulled += [
        (host.role, CONTEXTS["both"]["images"][part]) for part in ("host", "executor", "sandbox", "collector")
    ]
    assert len(pulled) == 8
    for role, image in pulled:
        registry, _, name = image.partition("/")
        account, _, _, region, *_ = registry.split(".")
        repository = f":ecr:{region}:{account}:repository/{name.partition(':')[0]}"
        assert may(template, role, "ecr:BatchGetImage", repository), image
        assert may(template, role, "ecr:GetAuthorizationToken", "*"), image


def test_the_scaler_sees_queues_and_sends_nothing(templates):
    """Red when it may do more than count permits."""
    scalers = [
        (template, process)
        for template in templates
        for process in processes(template)
        if process.name.startswith("ScheduledScaler")
    ]
    assert scalers
    for template, scaler in scalers:
        for queue in template.of_type("AWS::SQS::Queue"):
            assert not may(template, scaler.role, "sqs:SendMessage", queue)
        assert may(template, scaler.role, "sqs:GetQueueAttributes", "Queues")
