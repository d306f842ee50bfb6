"""The context of a deployment, and the budget of connections, without CDK."""

import dataclasses
import json
import math

import pytest

from sandfleet.infra_cdk import connections, synth_all
from sandfleet.infra_cdk.deployment import ROOT, WrongContext, read_deployment
from sandfleet.infra_cdk.sizes import SIZES
from sandfleet.shared.settings import Settings

FLEETS = ("fargate", "hosts", "both")


def deployment(**context):
    if context.get("fleet") == "both":
        context = {"hostGraphs": "coder", **context}
    return read_deployment(context)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("fleet", FLEETS)
def test_the_connections_of_all_parts_fit_at_maximum_scale(size, fleet):
    """Red when a maximum, a pool or the database's limit is changed without the others."""
    chosen = deployment(size=size, fleet=fleet)
    connections.check(chosen, SIZES[size])
    total = sum(connections.demand(chosen, SIZES[size]).values())
    assert total < SIZES[size].database_max_connections


def test_too_many_connections_are_refused_with_the_sum_and_its_parts():
    """Red when the check lets them pass, or does not say what takes them."""
    size = dataclasses.replace(SIZES["small"], executors=(1, 30))
    with pytest.raises(
        WrongContext, match=r"needs \d+ database connections .*executors on Fargate 1320.*sizes.py"
    ):
        connections.check(deployment(size="small"), size)


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_a_deployment_can_start_a_new_task_beside_the_least_that_run(size):
    """Red when a percentage, which ECS rounds down, leaves no room for one: the deployment would hang."""
    for least, percent in (
        (size.executors[0], size.executors_max_percent()),
        (size.gateways[0], connections.GATEWAYS_MAX_PERCENT),
    ):
        assert math.floor(least * percent / 100) > least


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_a_size_has_no_more_zones_than_a_template_without_an_account_knows(size):
    """Red when a size says three: CDK would give it two without a word, and the costs would be wrong."""
    assert size.nat_gateways <= size.zones <= 2


@pytest.mark.parametrize("protect", [None, True, False])
@pytest.mark.parametrize("size", SIZES)
def test_the_size_says_what_is_kept_and_protect_whether_it_can_be_removed(size, protect):
    """Red when a large deployment that was unprotected to remove it would lose its data, or protecting one keeps it."""
    chosen = deployment(size=size, protect=protect)
    assert chosen.kept == (size != "dev")
    assert chosen.protected == (chosen.kept if protect is None else protect)


def test_a_deployment_may_have_nobody_while_there_is_no_work():
    """By the scaler, which alone goes to none and back. Red when the size's least stays, or another figure changes."""
    chosen = deployment(size="dev", scaleToZero=True)
    assert (chosen.figures.executors, chosen.figures.hosts, chosen.scales_fast) == ((0, 2), (0, 2), True)
    for size in SIZES:
        from_zero = deployment(size=size, fleet="both", scaleToZero=True)
        connections.check(from_zero, from_zero.figures)
    assert dataclasses.replace(chosen.figures, executors=(1, 2), hosts=(1, 2)) == SIZES["dev"]


def test_the_scaler_sets_counts_unless_the_size_is_dev_or_the_context_says_otherwise():
    """What the simulator found best. Red when a default of it is changed without a word."""
    assert [deployment(size=size).scales_fast for size in SIZES] == [False, True, True]
    assert deployment(size="dev", fastScaling=True).scales_fast
    assert not deployment(size="small", fastScaling=False).scales_fast


def test_lambdas_without_a_proxy_count_with_all_their_environments():
    """Red when a burst of calls could open more connections than were counted."""
    size = SIZES["dev"]
    assert not size.proxy
    counted = connections.demand(deployment(size="dev"), size)["Lambdas"]
    assert counted == size.api_concurrency * size.api_pool + sum(connections.FUNCTION_CONCURRENCY.values())


def test_the_budget_knows_the_pools_that_processes_have():
    """Red when a default of the settings changes and the budget does not."""
    defaults = Settings.model_fields
    assert defaults["executor_pool_size"].default == connections.EXECUTOR_POOL
    assert defaults["api_pool_size"].default == connections.GATEWAY_POOL


@pytest.mark.parametrize(
    ("context", "said"),
    [
        ({"sise": "dev"}, "sise: Extra inputs are not permitted"),
        ({"size": "huge"}, "size: Input should be 'dev', 'small' or 'large'"),
        ({"fleet": "ec2"}, "fleet: Input should be 'fargate', 'hosts' or 'both'"),
        ({"project": "nowhere/langgraph.json"}, "project: there is no "),
        ({"project": "cdk.json"}, "is not a langgraph.json with graphs"),
        ({"fleet": "both"}, "name in hostGraphs those that run on hosts, of hello, coder"),
        ({"fleet": "both", "hostGraphs": "hello,coder"}, "use the fleet hosts"),
        ({"fleet": "both", "hostGraphs": "code"}, "hostGraphs names 'code'"),
        ({"hostGraphs": "coder"}, "hostGraphs is for the fleet both"),
        ({"secrets": '{"OPENAI_API_KEY": "my-secret"}'}, "write SECRET:KEY"),
        ({"alarmEmail": "me"}, "alarmEmail: "),
        ({"scaleToZero": True, "fastScaling": False}, "scaleToZero takes fastScaling"),
        ({"settings": '{"OPENAI_API_KEY": "x"}'}, "OPENAI_API_KEY is no setting of sandfleet"),
        ({"otlpEndpoint": "http://c:4318", "images": {"collector": "c"}}, "exclude each other"),
        ({"zones": "eu-central-1a"}, "zones names 1 of the 2 that the size dev has"),
        ({"warmHosts": 1}, "there are no Docker hosts"),
        ({"fleet": "hosts", "spot": True, "warmHosts": 1}, "no Spot instances in a warm pool"),
        ({"environment": "{"}, "environment: "),
    ],
)
def test_a_wrong_context_is_refused_with_the_key_and_what_to_do(context, said):
    """Red when a wrong value is taken, or its key is not named."""
    with pytest.raises(WrongContext) as refusal:
        read_deployment(context)
    assert said in str(refusal.value)
    assert "docs/deploy.md" in str(refusal.value)


def test_make_synth_has_each_size_with_each_fleet_and_each_fits():
    """Red when a combination is left out, or the sum of its connections is too large."""
    context = json.loads((ROOT / "cdk.json").read_text())["context"]
    made = dict(synth_all.deployments(context))
    assert set(made) == {f"{size}-{fleet}" for size in SIZES for fleet in FLEETS}
    for name, chosen in made.items():
        assert name == f"{chosen.size}-{chosen.fleet}"
        connections.check(chosen, chosen.figures)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[templates.big", "is not TOML"),
        (
            "[templates.big]\nmemory = 1\n",
            "[templates.big] memory: Input should be greater than or equal to 1024",
        ),
        (
            '[graphs.helo]\ntemplate = "default"\n',
            "[graphs.helo], but langgraph.json has no such graph: it has hello",
        ),
    ],
)
def test_wrong_sandbox_templates_are_refused_as_anywhere_else(tmp_path, text, said):
    """Red when the file is only copied: the hosts would not start, and nobody at the keyboard would see why."""
    project = tmp_path / "langgraph.json"
    project.write_text('{"graphs": {"hello": "./hello.py:graph"}}')
    (tmp_path / "sandfleet.toml").write_text(text)
    with pytest.raises(WrongContext) as refusal:
        read_deployment({"project": str(project)})
    assert said in str(refusal.value)
    sizes = '[templates.big]\nmemory = "400MiB"\n'
    (tmp_path / "sandfleet.toml").write_text(sizes)
    small = {"SANDFLEET_SANDBOX_WORKSPACE_BYTES": "100000000"}
    assert read_deployment({"project": str(project), "settings": small}).graphs == ("hello",)
    with pytest.raises(WrongContext, match="must exceed the workspace"):
        read_deployment(
            {"project": str(project), "settings": {"SANDFLEET_SANDBOX_WORKSPACE_BYTES": "400000000"}}
        )


def test_keys_of_cdk_itself_are_passed_over():
    """Red when a feature flag of cdk.json is taken for a key of ours."""
    context = json.loads((ROOT / "cdk.json").read_text())["context"]
    assert any(key.startswith("@aws-cdk/") for key in context)
    assert read_deployment({**context, "aws:cdk:bundling-stacks": ["**"]}).size == "dev"


def test_the_graphs_are_divided_between_the_pools():
    """Red when a graph has no pool, or two."""
    chosen = deployment(fleet="both")
    assert (chosen.graphs_of("default"), chosen.graphs_of("hosts")) == (("hello",), ("coder",))
    assert deployment(fleet="hosts").graphs_of("hosts") == ("hello", "coder")
