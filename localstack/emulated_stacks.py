"""Puts the stacks of a cloud assembly on an emulator, and takes them away, as CDK's command line does on AWS.

An assembly is the folder that ``cdk synth`` writes. Its manifests say which files it needs where; templates are among
them, since they are too long for a request.
"""

import asyncio
import io
import json
import time
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from sandfleet.localstack.aws_client import aws_client
from sandfleet.localstack.process import LocalStackError

ACCOUNT = "000000000000"
"""The emulator's only account."""
_BOOTSTRAP = "/cdk-bootstrap/hnb659fds/version"
_BOOTSTRAP_VERSION = "30"
_POLL_S = 0.1
_TIMEOUT_S = 600.0


class EmulatedStacks:
    """Stacks on the emulator at ``endpoint``."""

    def __init__(self, endpoint: str, region: str) -> None:
        self.endpoint = endpoint
        self.region = region

    def client(self, service: str) -> Any:
        """A client of a service of the emulator, to be entered."""
        return aws_client(service, self.endpoint, self.region, {})

    async def publish(self, assembly: Path) -> None:
        """Put the files of all stacks of an assembly where its templates look for them."""
        async with self.client("s3") as s3, self.client("ssm") as ssm:
            await ssm.put_parameter(Name=_BOOTSTRAP, Value=_BOOTSTRAP_VERSION, Type="String", Overwrite=True)
            for asset in await asyncio.to_thread(_assets, assembly):
                await self._put(s3, assembly, asset)

    async def _put(self, s3: Any, assembly: Path, asset: Mapping[str, Any]) -> None:
        source = assembly / asset["source"]["path"]
        body = await asyncio.to_thread(
            _zipped if asset["source"]["packaging"] == "zip" else Path.read_bytes, source
        )
        for place in asset["destinations"].values():
            bucket = self._named(place["bucketName"])
            with suppress(s3.exceptions.BucketAlreadyOwnedByYou):
                await s3.create_bucket(Bucket=bucket)
            await s3.put_object(Bucket=bucket, Key=place["objectKey"], Body=body)

    def _named(self, text: str) -> str:
        return text.replace("${AWS::AccountId}", ACCOUNT).replace("${AWS::Region}", self.region)

    async def deploy(self, assembly: Path, stack: str, **parameters: str) -> dict[str, str]:
        """Create a stack, or update it, and wait; returns its outputs. Its files must have been published.

        Raises `LocalStackError` with the reason if it fails.
        """
        (template,) = (
            place
            for asset in json.loads((assembly / f"{stack}.assets.json").read_bytes())["files"].values()
            if asset["source"]["path"] == f"{stack}.template.json"
            for place in asset["destinations"].values()
        )
        request = {
            "StackName": stack,
            "TemplateURL": f"{self.endpoint}/{self._named(template['bucketName'])}/{template['objectKey']}",
            "Parameters": [
                {"ParameterKey": key, "ParameterValue": value}
                for key, value in {"Emulated": "true", **parameters}.items()
            ],
            "Capabilities": ["CAPABILITY_NAMED_IAM"],
        }
        async with self.client("cloudformation") as cloudformation:
            if await self._status(cloudformation, stack) is None:
                await cloudformation.create_stack(**request)
            else:
                try:
                    await cloudformation.update_stack(**request)
                except cloudformation.exceptions.ClientError as error:
                    if "No updates" not in str(error):
                        raise
            found = await self._settled(cloudformation, stack)
        return {output["OutputKey"]: output["OutputValue"] for output in found.get("Outputs", ())}

    async def remove(self, *stacks: str) -> None:
        """Delete stacks one after the other. Raises `LocalStackError` if one cannot be."""
        async with self.client("cloudformation") as cloudformation:
            for stack in stacks:
                if await self._status(cloudformation, stack) is not None:
                    await cloudformation.delete_stack(StackName=stack)
                    await self._settled(cloudformation, stack)

    async def resource(self, stack: str, kind: str, logical_id: str) -> str:
        """The physical id of the resource of a type whose logical id begins so. Raises `LocalStackError` if there is none."""
        async with self.client("cloudformation") as cloudformation:
            answer = await cloudformation.describe_stack_resources(StackName=stack)
        for resource in answer["StackResources"]:
            if resource["ResourceType"] == kind and resource["LogicalResourceId"].startswith(logical_id):
                return str(resource["PhysicalResourceId"])
        raise LocalStackError(f"The stack {stack} has no {logical_id}.")

    async def _settled(self, cloudformation: Any, stack: str) -> dict[str, Any]:
        deadline = time.monotonic() + _TIMEOUT_S
        while time.monotonic() < deadline:
            found = await self._status(cloudformation, stack)
            status = found["StackStatus"] if found else "DELETE_COMPLETE"
            if status in ("CREATE_COMPLETE", "UPDATE_COMPLETE", "DELETE_COMPLETE"):
                return found or {}
            if "FAILED" in status or status.endswith("ROLLBACK_COMPLETE"):
                reason = await self._reason(cloudformation, stack)
                raise LocalStackError(f"The stack {stack} is {status}: {reason}")
            await asyncio.sleep(_POLL_S)
        raise LocalStackError(f"The stack {stack} was not done after {_TIMEOUT_S:.0f} s.")

    @staticmethod
    async def _status(cloudformation: Any, stack: str) -> dict[str, Any] | None:
        try:
            (found,) = (await cloudformation.describe_stacks(StackName=stack))["Stacks"]
        except cloudformation.exceptions.ClientError:
            return None  # there is none
        return dict(found) if found["StackStatus"] != "DELETE_COMPLETE" else None

    @staticmethod
    async def _reason(cloudformation: Any, stack: str) -> str:
        events = (await cloudformation.describe_stack_events(StackName=stack))["StackEvents"]
        reasons = [
            f"{event['LogicalResourceId']}: {event['ResourceStatusReason']}"
            for event in events
            if event["ResourceStatus"].endswith("_FAILED") and event.get("ResourceStatusReason")
        ]
        return "; ".join(reversed(reasons)) or "no reason given"


def _assets(assembly: Path) -> list[dict[str, Any]]:
    manifests = sorted(assembly.glob("*.assets.json"))
    return [asset for manifest in manifests for asset in json.loads(manifest.read_bytes())["files"].values()]


def _zipped(folder: Path) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for path in sorted(folder.rglob("*")):
            archive.write(path, path.relative_to(folder))
    return buffer.getvalue()
