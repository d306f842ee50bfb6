"""A web application firewall before the API: AWS' common rules, and a rate per address."""

from typing import Any

from aws_cdk import aws_wafv2 as waf
from constructs import Construct

from sandfleet.infra_cdk.api import Api
from sandfleet.infra_cdk.sizes import Size


class Firewall(Construct):
    """Attached to the API's stage."""

    def __init__(self, scope: Construct, id: str, api: Api, size: Size) -> None:
        super().__init__(scope, id)
        acl = waf.CfnWebACL(
            self,
            "Acl",
            scope="REGIONAL",
            default_action={"allow": {}},
            visibility_config=_visible("sandfleet"),
            rules=[
                {
                    "name": "rate",
                    "priority": 0,
                    "action": {"block": {}},
                    "visibilityConfig": _visible("rate"),
                    # Over five minutes: half of all that the API takes, from one address.
                    "statement": {
                        "rateBasedStatement": {"limit": size.requests_per_s * 150, "aggregateKeyType": "IP"}
                    },
                },
                {
                    "name": "common",
                    "priority": 1,
                    "overrideAction": {"none": {}},
                    "visibilityConfig": _visible("common"),
                    "statement": {
                        "managedRuleGroupStatement": {
                            "vendorName": "AWS",
                            "name": "AWSManagedRulesCommonRuleSet",
                            # Prompts are long, and may well be about HTML: the body is for the application to judge.
                            "ruleActionOverrides": [
                                {"name": name, "actionToUse": {"count": {}}}
                                for name in (
                                    "SizeRestrictions_BODY",
                                    "CrossSiteScripting_BODY",
                                    "GenericLFI_BODY",
                                    "GenericRFI_BODY",
                                    "EC2MetaDataSSRF_BODY",
                                )
                            ],
                        }
                    },
                },
            ],
        )
        waf.CfnWebACLAssociation(
            self,
            "Association",
            resource_arn=api.rest.deployment_stage.stage_arn,
            web_acl_arn=acl.attr_arn,
        )


def _visible(name: str) -> dict[str, Any]:
    return {"cloudWatchMetricsEnabled": True, "metricName": name, "sampledRequestsEnabled": False}
