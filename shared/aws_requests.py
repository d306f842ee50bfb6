"""The two requests to AWS that must be possible before anything else: a secret's value, and a token to log in to RDS.

They are signed by botocore, which every deployment has, and sent without its clients, whose loading costs a Lambda's cold
start a third of a second.
"""

import json
import urllib.error
import urllib.request
from functools import cache
from typing import Any

from sandfleet.shared.errors import InvalidSettings

_TIMEOUT_S = 10
TOKEN_LIFE_S = 900
"""How long RDS takes a token; a session that it opened stays."""


def read_secrets(arns: list[str], region: str, endpoint_url: str | None = None) -> dict[str, Any]:
    """The members of all secrets, each a JSON object. Raises InvalidSettings that names the secret, never its content."""
    found: dict[str, Any] = {}
    for arn in arns:
        try:
            found |= json.loads(_call(arn, region, endpoint_url)["SecretString"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = (
                f"HTTP {error.code}" if isinstance(error, urllib.error.HTTPError) else type(error).__name__
            )
            raise InvalidSettings(
                f"The secret {arn} of SANDFLEET_SECRET_ARNS could not be read ({reason}): it must exist, be a JSON "
                "object, and this process's role must have secretsmanager:GetSecretValue for it."
            ) from None
    return found


def login_token(host: str, port: int, user: str, region: str) -> str:
    """A password for ``user`` of a database on RDS that takes IAM logins, good for `TOKEN_LIFE_S`."""
    from botocore.auth import SigV4QueryAuth
    from botocore.awsrequest import AWSRequest

    request = AWSRequest("GET", f"https://{host}:{port}/?Action=connect&DBUser={user}")
    SigV4QueryAuth(_credentials(), "rds-db", region, expires=TOKEN_LIFE_S).add_auth(request)
    return str(request.url).removeprefix("https://")


def _call(arn: str, region: str, endpoint_url: str | None) -> dict[str, Any]:
    from botocore.auth import SigV4Auth
    from botocore.awsrequest import AWSRequest

    url = endpoint_url or f"https://secretsmanager.{region}.amazonaws.com"
    body = json.dumps({"SecretId": arn})
    signed = AWSRequest(
        "POST",
        f"{url.rstrip('/')}/",
        data=body,
        headers={
            "content-type": "application/x-amz-json-1.1",
            "x-amz-target": "secretsmanager.GetSecretValue",
        },
    )
    SigV4Auth(_credentials(bool(endpoint_url)), "secretsmanager", region).add_auth(signed)
    request = urllib.request.Request(signed.url, body.encode(), dict(signed.headers.items()))  # noqa: S310
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:  # noqa: S310
        return dict(json.load(answer))


@cache
def _session() -> Any:
    from botocore.session import get_session

    return get_session()


def _credentials(emulated: bool = False) -> Any:
    """Those of the environment, the task, or the machine; botocore renews them. An emulator checks none."""
    from botocore.credentials import Credentials

    if emulated:
        return Credentials("test", "test")
    found = _session().get_credentials()
    if found is None:
        raise InvalidSettings("There are no AWS credentials: give this process a role.")
    return found.get_frozen_credentials()
