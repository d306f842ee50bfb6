"""``make synth``: the templates of every size and fleet kind, below ``build/synth``. Needs neither an account nor Docker."""

import json
import sys
from collections.abc import Iterator
from itertools import product
from typing import Any

from aws_cdk import App
from aws_cdk import aws_lambda as lambda_

from sandfleet.infra_cdk.checks import add_checks
from sandfleet.infra_cdk.deployment import ROOT, Deployment, WrongContext, read_deployment
from sandfleet.infra_cdk.packaging import lambda_code
from sandfleet.infra_cdk.sizes import SIZES
from sandfleet.infra_cdk.stacks import add_stacks

FLEETS = ("fargate", "hosts", "both")


def deployments(context: dict[str, Any]) -> Iterator[tuple[str, Deployment]]:
    """Each size with each kind of fleet, by name; all else is as the context says. Raises WrongContext."""
    for size, fleet in product(SIZES, FLEETS):
        chosen = {**context, "size": size, "fleet": fleet}
        if fleet == "both" and not chosen.get("hostGraphs"):
            chosen["hostGraphs"] = _last_graph(chosen)
        yield f"{size}-{fleet}", read_deployment(chosen)


def main() -> None:
    """Write them and say where."""
    context = json.loads((ROOT / "cdk.json").read_text())["context"]
    try:
        for name, deployment in deployments({**context, **App().node.get_all_context()}):
            folder = ROOT / "build" / "synth" / name
            app = App(context=context, outdir=str(folder))
            add_stacks(app, deployment, lambda_.Code.from_asset(str(lambda_code(deployment))))
            add_checks(app)
            app.synth()
            sys.stdout.write(f"{folder.relative_to(ROOT)}\n")
    except WrongContext as error:
        sys.exit(str(error))


def _last_graph(context: dict[str, object]) -> str:
    """Something to divide the graphs by, for a project whose owner has not yet."""
    return read_deployment({**context, "fleet": "fargate"}).graphs[-1]


if __name__ == "__main__":
    main()
