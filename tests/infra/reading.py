"""How tests read templates: resources of a kind, and processes with their secrets and rights."""

import json
from dataclasses import dataclass
from typing import Any

SECRETS = ("SANDFLEET_SECRET_ARNS", "SANDFLEET_ADMIN_SECRET_ARN")
"""Variables that name secrets."""


def each(templates, kind):
    return [
        (f"{template.name}/{logical_id}", properties)
        for template in templates
        for logical_id, properties in template.of_type(kind).items()
    ]


def found(resources):
    assert resources, "the templates have none: this test would prove nothing"
    return resources


@dataclass(frozen=True)
class Process:
    """``name`` and ``role`` are logical ids; ``secrets`` are values of the template that stand for ARNs."""

    kind: str
    name: str
    role: str
    secrets: list[dict[str, Any]]


def processes(template):
    """Functions, tasks and hosts."""
    for name, function in template.of_type("AWS::Lambda::Function").items():
        variables = function["Environment"]["Variables"]
        yield Process("function", name, function["Role"]["Fn::GetAtt"][0], secrets_of(variables.items()))
    for name, task in template.of_type("AWS::ECS::TaskDefinition").items():
        for container in task["ContainerDefinitions"]:
            variables = [(v["Name"], v["Value"]) for v in container["Environment"]]
            yield Process("task", name, task["TaskRoleArn"]["Fn::GetAtt"][0], secrets_of(variables))
    for name, host in template.of_type("AWS::EC2::LaunchTemplate").items():
        data = host["LaunchTemplateData"]
        profile = data["IamInstanceProfile"]["Arn"]["Fn::GetAtt"][0]
        (role,) = template.of_type("AWS::IAM::InstanceProfile")[profile]["Roles"]
        script = data["UserData"]["Fn::Base64"]["Fn::Join"][1]
        yield Process(
            "host",
            name,
            role["Ref"],
            [value for variable in SECRETS for value in in_lines_of(script, variable)],
        )


def secrets_of(variables):
    return [value for name, text in variables if name in SECRETS for value in references_in(text)]


def references_in(value):
    """What a value takes from other resources and stacks."""
    if isinstance(value, list):
        return [found for item in value for found in references_in(item)]
    if not isinstance(value, dict):
        return []
    if value.keys() & {"Ref", "Fn::GetAtt", "Fn::ImportValue"}:
        return [value]
    return [found for item in value.values() for found in references_in(item)]


def in_lines_of(script, variable):
    """References in the lines ``VARIABLE=…`` of a script that CloudFormation joins from parts."""
    inside, found = False, []
    for part in script:
        if not isinstance(part, str):
            found += references_in(part) if inside else []
            continue
        line = part.rpartition("\n")
        inside = (inside and not line[1]) or line[2].startswith(f"{variable}=")
    return found


def may(template, role, action, resource):
    """Whether a role is allowed an action on something that has ``resource``, a value or a text, in it."""
    wanted = resource if isinstance(resource, str) else json.dumps(resource)
    documents = [
        policy["PolicyDocument"]
        for policy in template.body["Resources"][role]["Properties"].get("Policies", [])
    ]
    documents += [
        policy["PolicyDocument"]
        for policy in template.of_type("AWS::IAM::Policy").values()
        if {"Ref": role} in policy["Roles"]
    ]
    return any(
        action in listed(statement["Action"]) and wanted in json.dumps(listed(statement["Resource"]))
        for document in documents
        for statement in document["Statement"]
        if statement["Effect"] == "Allow"
    )


def listed(value):
    return value if isinstance(value, list) else [value]
