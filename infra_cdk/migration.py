"""The schema is brought to its newest revision once per deployment, before new code serves.

A custom resource calls a Lambda of ours; nothing else is between. Two deployments may race: an advisory lock orders them.
"""

import hashlib

from aws_cdk import CustomResource, Duration
from aws_cdk import aws_lambda as lambda_
from constructs import Construct, IConstruct

from sandfleet.infra_cdk.database import Database
from sandfleet.infra_cdk.deployment import ROOT
from sandfleet.infra_cdk.functions import FunctionSetting, python_function


class Migration(Construct):
    """Applied when the revisions have changed."""

    def __init__(self, scope: Construct, id: str, shared: FunctionSetting, database: Database) -> None:
        super().__init__(scope, id)
        self.function: lambda_.Function = python_function(
            self,
            "Migrate",
            shared,
            "migration.handler",
            timeout=Duration.minutes(14),
            memory_mib=512,
            concurrency=2,
            environment={
                "SANDFLEET_DATABASE_URL": database.admin_url,
                "SANDFLEET_DATABASE_IAM": "false",
                # It needs neither Redis nor sandboxes, and may not read their keys.
                "SANDFLEET_SECRET_ARNS": "[]",
                "SANDFLEET_ADMIN_SECRET_ARN": shared.emulator.choose("", database.admin_secret_arn),
            },
        )
        database.grant_admin(self.function)
        self._resource = CustomResource(
            self,
            "Schema",
            resource_type="Custom::SandfleetSchema",
            service_token=self.function.function_arn,
            properties={"Revisions": _revisions()},
            # A function that cannot even start answers nothing, and CloudFormation would wait for an hour.
            service_timeout=Duration.minutes(15),
        )
        # Its role must have its rights before it is called.
        self._resource.node.add_dependency(self.function.role)  # type: ignore[arg-type]

    def before(self, *parts: IConstruct) -> None:
        """These are created or updated after the schema."""
        for part in parts:
            part.node.add_dependency(self._resource)


def _revisions() -> str:
    digest = hashlib.sha256()
    for path in sorted((ROOT / "shared" / "db" / "versions").iterdir()):
        if path.is_file():
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]
