"""What goes to the gateway: the paths that stream, wait or carry files, by what the code of the routes does."""

import importlib
import inspect
import json
import pkgutil
import re
from types import CodeType, FunctionType, ModuleType

import pytest

from sandfleet.functions.api import routes
from sandfleet.functions.api.app import create_app
from sandfleet.functions.api.live import Live
from sandfleet.functions.api.requests import unless_gone
from sandfleet.infra_cdk.paths import LARGE, STAGE_PREFIX, TO_GATEWAY
from sandfleet.shared.settings import Settings

TAKES_LONG = {Live, unless_gone}
"""A response that lasts, and work for as long as its client waits: all that takes long does one of them."""


def names_in(code: CodeType) -> set[str]:
    """Names that a function uses, those of functions within it included."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*map(names_in, inner))


def takes_long(function: FunctionType, seen: set[FunctionType]) -> bool:
    """Whether a function of the API leads to one of `TAKES_LONG`, or to the body of a file."""
    seen.add(function)
    names = names_in(function.__code__)
    values = [function.__globals__.get(name) for name in names]
    values += [getattr(m, name, None) for m in values if isinstance(m, ModuleType) for name in names]
    if any(value is wanted for value in values for wanted in TAKES_LONG):
        return True
    return any(
        takes_long(value, seen)
        for value in values
        if inspect.isfunction(value)
        and value.__module__.startswith("sandfleet.functions.api")
        and value not in seen
    )


def all_routes():
    """(method, path, endpoint) of every module of routes, so that none has to be named here."""
    return [
        (method, route.path, route.endpoint)
        for module in pkgutil.iter_modules(routes.__path__)
        for route in importlib.import_module(f"{routes.__name__}.{module.name}").router.routes
        for method in route.methods
    ]


def long_routes():
    return [(method, path) for method, path, endpoint in all_routes() if takes_long(endpoint, set())]


@pytest.fixture(scope="module")
def integrations(templates):
    """Which method of API Gateway answers a request, by a function of the request."""
    (template, *_) = [t for t in templates if t.name.endswith("-app")]
    tree: dict[str, dict] = {}
    for logical_id, properties in template.of_type("AWS::ApiGateway::Resource").items():
        tree.setdefault(properties["ParentId"].get("Ref", "root"), {})[properties["PathPart"]] = logical_id
    verbs: dict[str, dict] = {}
    for properties in template.of_type("AWS::ApiGateway::Method").values():
        resource = properties["ResourceId"].get("Ref", "root")
        verbs.setdefault(resource, {})[properties["HttpMethod"]] = properties["Integration"]

    def reached(node, parts):
        if not parts:
            return verbs.get(node, {})
        children = tree.get(node, {})
        if parts[0] in children:  # the most specific one wins, and is not left again
            return reached(children[parts[0]], parts[1:])
        for name, child in children.items():
            if name.startswith("{") and not name.endswith("+}"):
                return reached(child, parts[1:])
        return verbs.get(children.get("{proxy+}"), {})

    def answering(method, path):
        concrete = [part.strip("{}") + "-1" if part.startswith("{") else part for part in path.split("/")[1:]]
        found = reached("root", concrete)
        return found.get(method) or found.get("ANY")

    return answering


def test_every_route_that_takes_long_goes_to_the_gateway_and_the_rest_of_runs_to_the_lambda(integrations):
    """Red when a route that streams or waits is added and not sent to the gateway, where a Lambda would cut it off."""
    found = long_routes()
    assert {("POST", "/sandboxes/{sandbox_id}/exec/stream"), ("GET", "/runs/{run_id}/stream")} <= set(found)
    assert len(found) > 20
    for method, path in found:
        assert integrations(method, path)["Type"] == "HTTP_PROXY", (method, path)
    others = {(method, path) for method, path, _ in all_routes()} - set(found)
    assert len(others) > 30
    for method, path in others:
        if not path.startswith("/sandboxes") and (method, path) not in LARGE:
            assert integrations(method, path)["Type"] == "AWS_PROXY", (method, path)


def test_files_of_sandboxes_go_to_the_gateway(integrations):
    """Red when bodies of hundreds of megabytes would have to fit a Lambda's six."""
    for method in ("GET", "PUT"):
        assert integrations(method, "/sandboxes/{sandbox_id}/file")["Type"] == "HTTP_PROXY"


def test_values_of_threads_go_to_the_gateway(integrations):
    """Red when a state or a history of more than a Lambda's six megabytes could not be read."""
    for method, path in LARGE:
        assert integrations(method, path)["Type"] == "HTTP_PROXY", (method, path)
    assert integrations("POST", "/threads/{thread_id}/state")["Type"] == "AWS_PROXY"


def test_the_list_names_no_route_that_is_gone():
    """Red when a path was renamed in the application only."""
    known = {(method, path) for method, path, _ in all_routes()}
    assert {(method, path) for method, path in TO_GATEWAY if method != "ANY"} <= known


def test_what_goes_to_the_gateway_streams_through_the_private_link(templates):
    """Red when one is buffered, misses the private link, or reaches another path there."""
    for template in templates:
        streamed = set()
        for properties in template.of_type("AWS::ApiGateway::Method").values():
            integration = properties["Integration"]
            if integration["Type"] != "HTTP_PROXY":
                assert (integration["Type"], properties["HttpMethod"]) == ("AWS_PROXY", "ANY")
                continue
            path = re.search(r"(/(runs|threads|sandboxes)[^\"]*)\"", json.dumps(integration["Uri"]))[1]
            assert integration["IntegrationHttpMethod"] == properties["HttpMethod"]
            assert {f"integration.request.path.{name}" for name in re.findall(r"{(\w+)}", path)} == set(
                integration.get("RequestParameters", {})
            )
            streamed.add((properties["HttpMethod"], path))
            on_aws = {key: value["Fn::If"][1] for key, value in integration.items() if "Fn::If" in value}
            assert on_aws["ResponseTransferMode"] == "STREAM"
            assert on_aws["ConnectionType"] == "VPC_LINK"
            assert on_aws["TimeoutInMillis"] == 15 * 60 * 1000
        if template.name.endswith("-app"):
            assert streamed == {(method, path.replace("+}", "}")) for method, path in TO_GATEWAY}


def test_the_gateway_takes_off_the_stage_that_private_integrations_put_before_the_path(templates):
    """Red when the stage is renamed and the gateway does not know: every stream would answer 404."""
    for template in templates:
        for stage in template.of_type("AWS::ApiGateway::Stage").values():
            variables = [
                variable
                for task in template.of_type("AWS::ECS::TaskDefinition").values()
                for container in task["ContainerDefinitions"]
                if container["Name"] == "gateway"
                for variable in container["Environment"]
            ]
            assert {"Name": "SANDFLEET_API_PREFIX", "Value": f"/{stage['StageName']}"} in variables
            assert stage["StageName"] == STAGE_PREFIX.strip("/")
    assert not [path for _, path, _ in all_routes() if path.startswith(f"{STAGE_PREFIX}/")]


def test_bodies_of_any_kind_pass_api_gateway_unchanged(templates):
    """Red when bytes that are no text would be taken for some."""
    apis = [p for t in templates for p in t.of_type("AWS::ApiGateway::RestApi").values()]
    assert [api["BinaryMediaTypes"] for api in apis] == [["*/*"]] * len(apis)
    assert apis


def test_every_path_of_the_application_reaches_it(integrations):
    """API Gateway does not fall back to a wider resource: one without a method answers 403. Red when a path is lost."""
    paths = create_app(Settings()).openapi()["paths"]
    assert len(paths) > 30
    for path, methods in paths.items():
        for method in methods:
            assert integrations(method.upper(), path), (method, path)
