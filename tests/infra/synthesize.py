"""Writes templates for tests, in a process of its own: CDK is JavaScript, and half of the time goes into starting it.

``python -m tests.infra.synthesize FOLDER`` with a JSON object name → context on stdin. Code and images are placeholders. A
context's ``constants`` are values for those of `infra_cdk.api`: what another release of sandfleet would have there.
"""

import json
import sys
from pathlib import Path

from aws_cdk import App
from aws_cdk import aws_lambda as lambda_

from sandfleet.infra_cdk import api
from sandfleet.infra_cdk.checks import add_checks
from sandfleet.infra_cdk.deployment import ROOT, read_deployment
from sandfleet.infra_cdk.stacks import add_stacks

IMAGES = {
    "executor": "executor:test",
    "gateway": "gateway:test",
    "host": "host:test",
    "sandbox": "python:test",
}


def main(folder: Path) -> None:
    code = folder / "code"
    code.mkdir()
    (code / "handler.py").touch()
    context = json.loads((ROOT / "cdk.json").read_text())["context"]
    for name, own in json.load(sys.stdin).items():
        constants = own.pop("constants", {})
        before = {constant: getattr(api, constant) for constant in constants}
        vars(api).update(constants)
        chosen = {**context, "images": IMAGES, **own}
        app = App(context=chosen, outdir=str(folder / name))
        add_stacks(app, read_deployment(chosen), lambda_.Code.from_asset(str(code)))
        add_checks(app)
        app.synth()
        vars(api).update(before)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
