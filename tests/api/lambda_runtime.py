"""What Lambda's runtime does: imports the handler once and calls it with one event after the other.

Events come as JSON lines on stdin, answers go as JSON lines to stdout.
"""

import json
import sys
from types import SimpleNamespace

from sandfleet.functions.api.lambda_handler import handler

_CONTEXT = SimpleNamespace(
    function_name="api",
    memory_limit_in_mb=512,
    invoked_function_arn="arn:aws:lambda:us-east-1:000000000000:function:api",
    aws_request_id="r",
    get_remaining_time_in_millis=lambda: 30_000,
)

if __name__ == "__main__":
    for line in sys.stdin:
        sys.stdout.write(json.dumps(handler(json.loads(line), _CONTEXT)) + "\n")
        sys.stdout.flush()
