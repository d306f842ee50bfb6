"""Spans and metrics of a deployment on AWS: collectors beside its processes, and what they are told."""

import json
import re

import pytest
from prometheus_client import REGISTRY

import sandfleet.fleet.executor.metrics
import sandfleet.fleet.host.metrics
import sandfleet.fleet.sandbox.metrics
import sandfleet.functions.api.gateway_metrics  # noqa: F401 (each registers its metrics)
from sandfleet.infra_cdk.telemetry import CONFIG, COUNTED, METRICS
from tests.infra.reading import found, may

LABELS = {
    metric._name: set(metric._labelnames)
    for metric in set(REGISTRY._names_to_collectors.values())
    if hasattr(metric, "_labelnames")
}


def text_of(value):
    """A value of a template as text, with a word for what CloudFormation fills in."""
    if isinstance(value, str):
        return value
    return "".join(part if isinstance(part, str) else "VALUE" for part in value["Fn::Join"][1])


@pytest.fixture(scope="module")
def tasks(templates):
    """(template, task) of the deployment that has collectors."""
    (template,) = [t for t in templates if t.name == "both/sandfleet-app"]
    return template, found(template.of_type("AWS::ECS::TaskDefinition"))


def test_every_task_has_a_collector_that_gets_its_spans_and_reads_its_metrics(tasks):
    """Red when a task has none, when its process sends elsewhere, or when it may not pass on what it gets."""
    template, definitions = tasks
    for task in definitions.values():
        (process, collector) = task["ContainerDefinitions"]
        variables = {v["Name"]: v["Value"] for v in process["Environment"]}
        config = json.loads(text_of({v["Name"]: v["Value"] for v in collector["Environment"]}[CONFIG]))
        (scraped,) = config["receivers"]["prometheus"]["config"]["scrape_configs"]
        assert scraped["static_configs"] == [
            {"targets": [variables["SANDFLEET_METRICS_LISTEN"]], "labels": {"deployment": "sandfleet"}}
        ]
        assert variables["SANDFLEET_METRICS_LISTEN"] == METRICS
        endpoint = config["receivers"]["otlp"]["protocols"]["http"]["endpoint"]
        assert variables["SANDFLEET_OTLP_ENDPOINT"] == f"http://{endpoint}"
        for pipeline in config["service"]["pipelines"].values():
            assert set(pipeline["receivers"]) <= set(config["receivers"])
            assert set(pipeline["exporters"]) <= set(config["exporters"])
        assert collector["Essential"] is False
        role = task["TaskRoleArn"]["Fn::GetAtt"][0]
        for action in ("xray:PutTraceSegments", "logs:PutLogEvents"):
            assert may(template, role, action, ""), action


def test_a_host_has_one_for_its_daemon_and_its_executor(tasks):
    """Red when the machine starts none, or it reads one of the two."""
    template, _ = tasks
    (launch,) = template.of_type("AWS::EC2::LaunchTemplate").values()
    script = text_of(launch["LaunchTemplateData"]["UserData"]["Fn::Base64"])
    (line,) = re.findall(rf"^COLLECTOR_ENVIRONMENT='{CONFIG}=(.*)'$", script, re.MULTILINE)
    (scraped,) = json.loads(line)["receivers"]["prometheus"]["config"]["scrape_configs"]
    assert scraped["static_configs"][0]["targets"] == ["127.0.0.1:9465", "127.0.0.1:9464"]


def test_a_collector_elsewhere_gets_the_spans_and_nothing_is_beside_the_tasks(templates):
    """Red when the context's address does not reach a process."""
    (template,) = [t for t in templates if t.name == "hosts/sandfleet-app"]
    (task,) = template.of_type("AWS::ECS::TaskDefinition").values()
    (process,) = task["ContainerDefinitions"]
    variables = {v["Name"]: v["Value"] for v in process["Environment"]}
    assert variables["SANDFLEET_OTLP_ENDPOINT"] == "http://collector.acme.internal:4318"
    (launch,) = template.of_type("AWS::EC2::LaunchTemplate").values()
    script = text_of(launch["LaunchTemplateData"]["UserData"]["Fn::Base64"])
    assert script.count("SANDFLEET_OTLP_ENDPOINT=http://collector.acme.internal:4318") == 2


def test_settings_of_the_context_reach_every_process(templates):
    """Red when functions, gateway or hosts are left out."""
    (template,) = [t for t in templates if t.name == "hosts/sandfleet-app"]
    for function in found(template.of_type("AWS::Lambda::Function")).values():
        assert function["Environment"]["Variables"]["SANDFLEET_LOG_LEVEL"] == "WARNING"
    (task,) = template.of_type("AWS::ECS::TaskDefinition").values()
    assert {"Name": "SANDFLEET_LOG_LEVEL", "Value": "WARNING"} in task["ContainerDefinitions"][0][
        "Environment"
    ]
    (launch,) = template.of_type("AWS::EC2::LaunchTemplate").values()
    assert json.dumps(launch).count("SANDFLEET_LOG_LEVEL=WARNING") == 2


@pytest.mark.parametrize("labels", COUNTED, ids=lambda labels: "-".join(labels) or "none")
def test_what_is_counted_is_served(labels):
    """Red when a metric or a label of it was renamed: CloudWatch would get nothing."""
    for name in COUNTED[labels]:
        assert set(labels) <= LABELS[name.removesuffix("_total")], name
