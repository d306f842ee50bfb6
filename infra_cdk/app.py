"""The CDK application: ``cdk deploy`` runs ``python -m sandfleet.infra_cdk.app``."""

import sys

from aws_cdk import App
from aws_cdk import aws_lambda as lambda_

from sandfleet.infra_cdk.deployment import WrongContext, read_deployment
from sandfleet.infra_cdk.packaging import lambda_code
from sandfleet.infra_cdk.stacks import add_stacks


def main() -> None:
    """Write the templates for the context that the CLI hands over. A wrong one ends with a line per problem."""
    app = App()
    try:
        deployment = read_deployment(app.node.get_all_context())
        add_stacks(app, deployment, lambda_.Code.from_asset(str(lambda_code(deployment))))
    except WrongContext as error:
        sys.exit(str(error))
    app.synth()


if __name__ == "__main__":
    main()
