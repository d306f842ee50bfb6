"""The API's one address: a Regional REST API before the Lambda, and before the gateway for what streams, waits or carries files.

HTTP APIs do not stream. A REST API does since its integrations have a response transfer mode: 15 minutes at most, 5 minutes
without a byte (the gateway sends one every 15 s), 2 MB/s after the first 10 MB.
"""

from typing import Final

from aws_cdk import Aws, CfnResource, Fn, RemovalPolicy, Stack
from aws_cdk import aws_apigateway as apigateway
from aws_cdk import aws_apigatewayv2 as apigatewayv2
from aws_cdk import aws_iam as iam
from aws_cdk import aws_lambda as lambda_
from constructs import Construct

from sandfleet.infra_cdk.emulated import Emulator
from sandfleet.infra_cdk.gateway import Gateway
from sandfleet.infra_cdk.logs import log_group
from sandfleet.infra_cdk.network import Network
from sandfleet.infra_cdk.paths import STAGE_PREFIX, TO_GATEWAY
from sandfleet.infra_cdk.refusals import add_refusals
from sandfleet.infra_cdk.sizes import Size

STAGE = STAGE_PREFIX.strip("/")
STREAM_TIMEOUT_MS: Final = 15 * 60 * 1000
"""The longest that API Gateway takes for a streamed response. Clients come back with Last-Event-ID."""


class Api(Construct):
    """``url`` is what `langgraph-sdk` gets."""

    def __init__(
        self,
        scope: Construct,
        id: str,
        size: Size,
        network: Network,
        function: lambda_.Function,
        gateway: Gateway,
        emulator: Emulator,
        *,
        own_logs_role: bool,
    ) -> None:
        super().__init__(scope, id)
        access = log_group(self, "AccessLogs", size)
        self.rest = apigateway.RestApi(
            self,
            "Rest",
            # Names it in CloudWatch, where deployments stand side by side.
            rest_api_name=Stack.of(self).stack_name,
            description="sandfleet",
            endpoint_configuration=apigateway.EndpointConfiguration(types=[apigateway.EndpointType.REGIONAL]),
            cloud_watch_role=False,  # see _let_it_log
            # Bodies are passed on as they are: a Lambda gets them as base64, and answers so what is no text.
            binary_media_types=["*/*"],
            deploy_options=apigateway.StageOptions(
                stage_name=STAGE,
                tracing_enabled=True,
                metrics_enabled=True,
                throttling_rate_limit=size.requests_per_s,
                throttling_burst_limit=size.requests_per_s * 2,
                access_log_destination=apigateway.LogGroupLogDestination(access),
                # Ids and figures; no addresses of callers, no query, no body.
                access_log_format=apigateway.AccessLogFormat.custom(
                    '{"requestId":"$context.requestId","method":"$context.httpMethod","path":"$context.resourcePath",'
                    '"status":"$context.status","bytes":"$context.responseLength","ms":"$context.responseLatency",'
                    '"integration_ms":"$context.integrationLatency","trace":"$context.xrayTraceId",'
                    '"transfer":"$context.integration.responseTransferMode",'
                    '"first_ms":"$context.integration.timeToFirstContent"}'
                ),
            ),
        )
        self._to_lambda = apigateway.LambdaIntegration(function, proxy=True, allow_test_invoke=False)
        self._gateway_url = gateway.url
        self._balancer = gateway.balancer.load_balancer_arn
        self._emulator = emulator
        self._link = apigatewayv2.CfnVpcLink(
            self,
            "Link",
            name=Fn.join("-", [Aws.STACK_NAME, "gateway"]),
            subnet_ids=[subnet.subnet_id for subnet in network.vpc.private_subnets],
            security_group_ids=[network.link.security_group_id],
        )
        add_refusals(self.rest)
        self._route()
        if own_logs_role:
            self._let_it_log()
        self.url = self.rest.url

    def _let_it_log(self) -> None:
        """Give API Gateway a role to write logs with: one for all APIs of the account in the region, without which it refuses
        a stage that logs. It stays when the stack is removed, or the logs of other APIs would end with it."""
        role = iam.Role(
            self,
            "LogsRole",
            assumed_by=iam.ServicePrincipal("apigateway.amazonaws.com"),
            managed_policies=[
                iam.ManagedPolicy.from_aws_managed_policy_name(
                    "service-role/AmazonAPIGatewayPushToCloudWatchLogs"
                )
            ],
        )
        account = apigateway.CfnAccount(self, "Account", cloud_watch_role_arn=role.role_arn)
        for resource in (role.node.default_child, account):
            assert isinstance(resource, CfnResource)
            resource.apply_removal_policy(RemovalPolicy.RETAIN)
            resource.cfn_options.condition = self._emulator.no
        self.rest.deployment_stage.node.add_dependency(account)

    def _route(self) -> None:
        """All to the Lambda, but what goes to the gateway.

        API Gateway matches the most specific resource and does not fall back to a wider one, so each resource on the way
        to the gateway's paths has to send the rest below it to the Lambda too. A resource with a variable child cannot
        have a greedy one beside it: there the variable child matches all.
        """
        paths = {path for _, path in TO_GATEWAY}
        ancestors = {ancestor for path in paths for ancestor in _ancestors(path)}
        self._send_all_to_lambda(self.rest.root)
        self._send_rest_to_lambda(self.rest.root)
        for path in sorted(paths | ancestors, key=lambda p: (p.count("/"), p)):
            resource = self.rest.root.resource_for_path(path)
            methods = [method for method, other in TO_GATEWAY if other == path]
            if "ANY" not in methods:
                self._send_all_to_lambda(resource)
            if path in ancestors and not any(o.startswith(f"{path}/{{") for o in paths | ancestors):
                self._send_rest_to_lambda(resource)
            for method in methods:
                self._send_to_gateway(resource, method, path)

    def _send_all_to_lambda(self, resource: apigateway.IResource) -> None:
        resource.add_method("ANY", self._to_lambda)

    def _send_rest_to_lambda(self, resource: apigateway.IResource) -> None:
        self._send_all_to_lambda(resource.add_resource("{proxy+}"))

    def _send_to_gateway(self, resource: apigateway.IResource, method: str, path: str) -> None:
        names = [part.strip("{+}") for part in path.split("/") if part.startswith("{")]
        added = resource.add_method(
            method,
            apigateway.HttpIntegration(
                f"{self._gateway_url}{path.replace('+}', '}')}",
                http_method=method,
                proxy=True,
                options=apigateway.IntegrationOptions(
                    request_parameters={
                        f"integration.request.path.{name}": f"method.request.path.{name}" for name in names
                    },
                ),
            ),
            request_parameters={f"method.request.path.{name}": True for name in names},
        )
        real, nothing = self._emulator.no.logical_id, Fn.ref("AWS::NoValue")
        resource_of = added.node.default_child
        assert isinstance(resource_of, apigateway.CfnMethod)
        set_here = {
            "ConnectionType": "VPC_LINK",
            "ConnectionId": self._link.ref,
            "IntegrationTarget": self._balancer,
            "ResponseTransferMode": "STREAM",
            "TimeoutInMillis": STREAM_TIMEOUT_MS,
        }
        # CDK makes a new deployment of the stage when what it knows of a method has changed: it does not know overrides.
        assert self.rest.latest_deployment is not None
        self.rest.latest_deployment.add_to_logical_id({path: set_here})
        for name, value in set_here.items():
            resource_of.add_property_override(f"Integration.{name}", Fn.condition_if(real, value, nothing))


def _ancestors(path: str) -> set[str]:
    parts = path.split("/")
    return {"/".join(parts[:count]) for count in range(2, len(parts))}
