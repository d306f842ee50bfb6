"""One template for AWS and for the emulator: what the emulator lacks is left out, and nothing points at it."""

import json

from ministack.services.cloudformation.provisioners import _RESOURCE_HANDLERS

from sandfleet.infra_cdk.emulated import PARAMETER


def resolve(value, gone):
    """A value as it is with the parameter set; ``gone`` collects references to what is left out."""
    if isinstance(value, list):
        return [resolve(item, gone) for item in value]
    if not isinstance(value, dict):
        return value
    if "Fn::If" in value:
        condition, emulated, real = value["Fn::If"]
        return resolve(emulated if condition == "IsEmulated" else real, gone)
    return {key: resolve(item, gone) for key, item in value.items()}


def references(value):
    if isinstance(value, list):
        for item in value:
            yield from references(item)
    elif isinstance(value, dict):
        if set(value) == {"Ref"}:
            yield value["Ref"]
        elif set(value) == {"Fn::GetAtt"}:
            yield value["Fn::GetAtt"][0]
        else:
            for item in value.values():
                yield from references(item)


def test_what_the_emulator_lacks_is_left_out(templates):
    """Red when a construct brings a type that the emulator refuses, and the condition does not know it."""
    for template in templates:
        assert template.body["Parameters"][PARAMETER]["Default"] == "false"
        for logical_id, resource in template.body["Resources"].items():
            kind = resource["Type"]
            known = kind in _RESOURCE_HANDLERS or kind.startswith("Custom::")
            assert known or resource.get("Condition") == "IsAws", (template.name, logical_id, kind)


def test_nothing_that_is_there_points_at_what_is_left_out(templates):
    """Red when a value names a database, a policy or a link that the emulator does not have."""
    for template in templates:
        resources = template.body["Resources"]
        absent = {
            logical_id for logical_id, resource in resources.items() if resource.get("Condition") == "IsAws"
        }
        assert absent
        there = {
            logical_id: r.get("Properties", {})
            for logical_id, r in resources.items()
            if logical_id not in absent
        }
        for logical_id, value in {**there, **template.body.get("Outputs", {})}.items():
            assert not absent & set(references(resolve(value, absent))), (template.name, logical_id)


def test_on_aws_nothing_of_the_emulator_is_left(templates):
    """Red when a default points at an emulator."""
    for template in templates:
        for name, parameter in template.body["Parameters"].items():
            if parameter.get("Description", "").startswith("For an emulator only"):
                assert parameter["Default"] == "", name
        for logical_id, resource in template.body["Resources"].items():
            own = ("AWS::EC2::LaunchTemplate", "AWS::ECS::TaskDefinition")
            if resource["Type"] not in own:  # whose processes ask one another
                assert "127.0.0.1" not in json.dumps(resource), (template.name, logical_id)
