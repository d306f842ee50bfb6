"""The two requests to AWS that are made without its clients, held against an emulator's secrets and against botocore."""

import json
import uuid
from collections.abc import AsyncIterator, Iterator
from urllib.parse import parse_qs, urlsplit

import pytest
from aiobotocore.session import get_session
from botocore.session import get_session as get_blocking_session

from sandfleet.shared import aws_requests
from sandfleet.shared.aws_requests import TOKEN_LIFE_S, login_token, read_secrets
from sandfleet.shared.errors import InvalidSettings
from sandfleet.shared.settings import read_settings
from tests.fixtures_emulators import REGION, emulator_with
from tests.fixtures_servers import TestServers


@pytest.fixture(scope="module")
async def emulator(servers: TestServers, pytestconfig: pytest.Config) -> AsyncIterator[str]:
    """Endpoint of an emulator that has Secrets Manager."""
    async with emulator_with("secretsmanager", pytestconfig, servers) as endpoint:
        yield endpoint


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of this process; nothing is found anywhere else."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    for name in ("AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    aws_requests._session.cache_clear()
    yield
    aws_requests._session.cache_clear()


async def stored(emulator: str, content: str) -> str:
    """ARN of a new secret."""
    async with get_session().create_client(
        "secretsmanager",
        region_name=REGION,
        endpoint_url=emulator,
        aws_access_key_id="test",
        aws_secret_access_key="test",
    ) as aws:
        made = await aws.create_secret(Name=uuid.uuid4().hex, SecretString=content)
    return str(made["ARN"])


async def test_the_members_of_all_secrets_are_read(emulator: str) -> None:
    """Red when only one of them is, or the request is not one that the service understands."""
    arns = [await stored(emulator, text) for text in ('{"a": "1", "b": "2"}', '{"b": "3"}')]
    assert read_secrets(arns, REGION, emulator) == {"a": "1", "b": "3"}


@pytest.mark.parametrize("content", ["hunter2", '["hunter2"]', '"hunter2"'])
async def test_a_secret_that_is_no_json_object_is_named_without_its_content(
    emulator: str, content: str
) -> None:
    """Red when the error, which goes to the log, shows what was read."""
    arn = await stored(emulator, content)
    with pytest.raises(InvalidSettings) as raised:
        read_secrets([arn], REGION, emulator)
    assert arn in raised.value.message
    assert "hunter2" not in raised.value.message
    assert raised.value.__suppress_context__


async def test_a_secret_that_is_not_there_is_named(emulator: str) -> None:
    """Red when the process ends with the client's words, which name neither the setting nor the right that it lacks."""
    with pytest.raises(
        InvalidSettings, match=r"secret none of SANDFLEET_SECRET_ARNS .*HTTP 4.*GetSecretValue"
    ):
        read_secrets(["none"], REGION, emulator)


async def test_settings_come_from_secrets_too(emulator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when they are not read, or a member that is no setting is passed over: it would be a typing error."""
    arn = await stored(emulator, json.dumps({"redis_password": "p", "redis_url": "redis://r:6379/0"}))
    monkeypatch.setenv("SANDFLEET_SECRET_ARNS", json.dumps([arn]))
    monkeypatch.setenv("AWS_ENDPOINT_URL", emulator)
    assert read_settings().redis_url == "redis://:p@r:6379/0"
    wrong = await stored(emulator, '{"redis_pasword": "p"}')
    monkeypatch.setenv("SANDFLEET_SECRET_ARNS", json.dumps([arn, wrong]))
    with pytest.raises(InvalidSettings, match="'redis_pasword', which is no setting"):
        read_settings()


async def test_a_login_token_is_the_one_that_botocores_own_client_makes() -> None:
    """Red when host, port, user, region or lifetime are not the ones that are signed: RDS would refuse the login."""
    client = get_blocking_session().create_client("rds", region_name=REGION)
    while True:
        theirs = client.generate_db_auth_token("db.example", 5432, "sandfleet", REGION)
        ours = login_token("db.example", 5432, "sandfleet", REGION)
        a, b = (parse_qs(urlsplit(f"https://{token}").query) for token in (theirs, ours))
        if a["X-Amz-Date"] == b["X-Amz-Date"]:  # made in the same second
            break
    client.close()
    assert ours.startswith("db.example:5432/?")
    assert a == b
    assert b["X-Amz-Expires"] == [str(TOKEN_LIFE_S)]


async def test_a_process_without_keys_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when it fails with an AttributeError."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(InvalidSettings, match="no AWS credentials"):
        login_token("db.example", 5432, "sandfleet", REGION)
