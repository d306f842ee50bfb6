"""What API Gateway answers by itself, in the form of the application's errors: ``{"detail": …, "code": …}``."""

from typing import Final

from aws_cdk import aws_apigateway as apigateway

_TYPES = apigateway.ResponseType
_AS_IT_SAYS: Final = "$context.error.messageString"
"""API Gateway's own sentence, in quotation marks already."""

REFUSALS: Final = (
    (_TYPES.THROTTLED, "429", "too_many_requests", '"The API takes no more requests now. Try again."', 1),
    (_TYPES.QUOTA_EXCEEDED, "429", "too_many_requests", '"The quota is used up. Try again later."', 60),
    (_TYPES.REQUEST_TOO_LARGE, "413", "body_too_large", _AS_IT_SAYS, None),
    # Among them a Lambda whose reserved concurrency is in use, which would be a 500 that says nothing.
    (_TYPES.INTEGRATION_FAILURE, "503", "unavailable", '"The API is busy. Try again."', 1),
    (_TYPES.INTEGRATION_TIMEOUT, "504", "unavailable", '"The API did not answer in time. Try again."', 1),
    (_TYPES.WAF_FILTERED, "403", "forbidden", '"The firewall refused the request."', None),
    (_TYPES.DEFAULT_4_XX, None, "bad_request", _AS_IT_SAYS, None),
    (_TYPES.DEFAULT_5_XX, None, "internal", _AS_IT_SAYS, None),
)
"""(kind, status or None for API Gateway's own, code, detail as JSON, seconds for ``Retry-After`` or None)."""


def add_refusals(api: apigateway.RestApi) -> None:
    """Set them. A browser sees them, too: the application's CORS headers are not on answers that are not its own."""
    for kind, status, code, detail, retry_after_s in REFUSALS:
        headers = {"Access-Control-Allow-Origin": "'*'", "Access-Control-Expose-Headers": "'Retry-After'"}
        if retry_after_s is not None:
            headers["Retry-After"] = f"'{retry_after_s}'"
        api.add_gateway_response(
            f"On{kind.response_type.title().replace('_', '')}",
            type=kind,
            status_code=status,
            response_headers=headers,
            templates={"application/json": f'{{"detail": {detail}, "code": "{code}"}}'},
        )
