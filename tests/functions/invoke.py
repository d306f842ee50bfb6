"""What Lambda's runtime does: imports a handler once and calls it with each event, a JSON line on stdin.

The module is the first argument. Answers, errors and the modules that were loaded are the last line on stdout; logs and
metrics come before it, as they do in CloudWatch.
"""

import importlib
import json
import sys
from types import SimpleNamespace

_CONTEXT = SimpleNamespace(
    function_name="test",
    memory_limit_in_mb=512,
    invoked_function_arn="arn:aws:lambda:us-east-1:000000000000:function:test",
    aws_request_id="r",
    get_remaining_time_in_millis=lambda: 60_000,
)

if __name__ == "__main__":
    module = importlib.import_module(sys.argv[1])
    loaded = sorted({name.partition(".")[0] for name in sys.modules})
    answer = module.handler(json.load(sys.stdin), _CONTEXT)
    print(json.dumps({"answer": answer, "loaded": loaded}))
