"""What goes to the gateway: the paths that stream or wait, and no others."""

import inspect
import json
import re

from sandfleet.functions.api.app import create_app
from sandfleet.functions.api.routes import runs, stateless_runs
from sandfleet.infra_cdk.paths import STREAMING
from sandfleet.shared.settings import Settings

_WAITS = ("stream_response(", "wait_response(", "joined_stream(", "stream_created(", "wait_created(")


def test_the_list_has_every_route_that_streams_or_waits():
    """Red when a route that does is added and not sent to the gateway, where a Lambda would cut it off at its window."""
    found = set()
    for module in (runs, stateless_runs):
        for route in module.router.routes:
            if any(call in inspect.getsource(route.endpoint) for call in _WAITS):
                found |= {(method, route.path) for method in route.methods}
    assert found == set(STREAMING)
    known = {
        (method, path)
        for path, methods in create_app(Settings()).openapi()["paths"].items()
        for method in methods
    }
    assert {(method.lower(), path) for method, path in STREAMING} <= known


def test_these_and_no_others_stream_through_the_gateway(templates):
    """Red when one is buffered, or misses the private link."""
    for template in templates:
        streamed = set()
        for properties in template.of_type("AWS::ApiGateway::Method").values():
            integration = properties["Integration"]
            if integration["Type"] != "HTTP_PROXY":
                assert (integration["Type"], properties["HttpMethod"]) == ("AWS_PROXY", "ANY")
                continue
            path = re.search(r"(/(runs|threads)[^\"]*)\"", json.dumps(integration["Uri"]))[1]
            streamed.add((properties["HttpMethod"], path))
            on_aws = {key: value["Fn::If"][1] for key, value in integration.items() if "Fn::If" in value}
            assert on_aws["ResponseTransferMode"] == "STREAM"
            assert on_aws["ConnectionType"] == "VPC_LINK"
            assert on_aws["TimeoutInMillis"] == 15 * 60 * 1000
        if template.name.endswith("-app"):
            assert streamed == set(STREAMING)


def test_every_path_of_the_application_reaches_it(templates):
    """API Gateway does not fall back to a wider resource: one without a method answers 403. Red when a path is lost."""
    (template, *_) = [t for t in templates if t.name.endswith("-app")]
    resources, methods = (
        template.of_type("AWS::ApiGateway::Resource"),
        template.of_type("AWS::ApiGateway::Method"),
    )
    tree: dict[str, dict] = {}
    for logical_id, properties in resources.items():
        tree.setdefault(properties["ParentId"].get("Ref", "root"), {})[properties["PathPart"]] = logical_id
    verbs: dict[str, set] = {}
    for properties in methods.values():
        verbs.setdefault(properties["ResourceId"].get("Ref", "root"), set()).add(properties["HttpMethod"])

    def reached(node, parts):
        if not parts:
            return verbs.get(node, set())
        children = tree.get(node, {})
        if parts[0] in children:  # the most specific one wins, and is not left again
            return reached(children[parts[0]], parts[1:])
        for name, child in children.items():
            if name.startswith("{") and not name.endswith("+}"):
                return reached(child, parts[1:])
        return verbs.get(children.get("{proxy+}"), set())

    routes = create_app(Settings()).openapi()["paths"]
    assert len(routes) > 30
    for path in routes:
        concrete = [part.strip("{}") + "-1" if part.startswith("{") else part for part in path.split("/")[1:]]
        assert "ANY" in reached("root", concrete), path
