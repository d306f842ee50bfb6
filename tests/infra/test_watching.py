"""What the templates watch, whom that tells, and how it scales."""

import json
import re
from pathlib import Path

from sandfleet.functions.scaler.figures import figures_of
from sandfleet.infra_cdk.scaling import AGE_S, SHRINK_PAUSE, STEPS
from sandfleet.infra_cdk.sizes import SIZES
from sandfleet.shared.scaling.decision import Load
from sandfleet.shared.scaling.latencies import _PERCENTILES, _STAGES
from tests.infra.conftest import CONTEXTS
from tests.infra.reading import each, found


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
