"""API Gateway itself: that its stage can be made, is made anew when something changes, and how it refuses."""

import json

import pytest

from sandfleet.infra_cdk.refusals import REFUSALS
from tests.infra.conftest import CHANGED, PLAIN, read_templates
from tests.infra.reading import each, found


@pytest.fixture(scope="module")
def plain(synthesized):
    return read_templates(synthesized, PLAIN)


@pytest.fixture(scope="module")
def changed(synthesized):
    return read_templates(synthesized, CHANGED)


def test_a_stage_that_logs_can_be_made_in_a_new_account(templates):
    """Red without a role for the region's APIs, which must be there before the stage: AWS refuses that else."""
    for template in templates:
        for name, stage in template.of_type("AWS::ApiGateway::Stage").items():
            assert stage["AccessLogSetting"], name
            ((account, properties),) = template.of_type("AWS::ApiGateway::Account").items()
            assert account in template.body["Resources"][name]["DependsOn"]
            role = properties["CloudWatchRoleArn"]["Fn::GetAtt"][0]
            for kept in (account, role):  # other APIs log with it, too
                assert template.body["Resources"][kept]["DeletionPolicy"] == "Retain"
                assert template.body["Resources"][kept]["Condition"] == "IsAws"


def test_an_accounts_own_role_is_left_alone(changed):
    """Red when the context cannot say that there is one."""
    assert not each(changed, "AWS::ApiGateway::Account")


def test_a_changed_integration_makes_a_new_deployment_of_the_stage(plain, changed):
    """Red when what is set past CDK's back is no part of the deployment's name: the stage would serve the old one."""
    ((before, _),) = found(each(plain, "AWS::ApiGateway::Deployment"))
    ((after, _),) = found(each(changed, "AWS::ApiGateway::Deployment"))
    assert before.rpartition("/")[2] != after.rpartition("/")[2]


def test_api_gateways_own_refusals_have_the_form_of_ours_and_say_when_to_try_again(templates):
    """Red when a caller over the rate gets no Retry-After, or a body that is not that of an error of ours."""
    for template in templates:
        answers = {
            a["ResponseType"]: a for a in template.of_type("AWS::ApiGateway::GatewayResponse").values()
        }
        if not answers:
            continue
        assert set(answers) == {kind.response_type for kind, *_ in REFUSALS}
        for kind, answer in answers.items():
            (body,) = answer["ResponseTemplates"].values()
            filled = json.loads(body.replace("$context.error.messageString", '"said"'))
            assert set(filled) == {"detail", "code"}, kind
            headers = answer["ResponseParameters"]
            assert headers["gatewayresponse.header.Access-Control-Allow-Origin"] == "'*'"
            if answer.get("StatusCode") in ("429", "503", "504"):
                assert int(headers["gatewayresponse.header.Retry-After"].strip("'")) >= 1, kind
        assert (answers["THROTTLED"]["StatusCode"], answers["INTEGRATION_FAILURE"]["StatusCode"]) == (
            "429",
            "503",
        )
    found(each(templates, "AWS::ApiGateway::GatewayResponse"))
