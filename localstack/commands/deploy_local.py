"""``sandfleet deploy-local``: the templates of ``cdk deploy`` on an emulator of this machine, until Ctrl-C."""

import asyncio
from pathlib import Path

from sandfleet.localstack.local_deployment import LocalDeployment
from sandfleet.localstack.terminal import Steps, out

_KEY = "api-key"


async def deploy_local(root: Path, project: Path, size: str) -> int:
    """Deploy, print how to reach it, and remove it all on a signal."""
    deployment = LocalDeployment(
        root / "deployment", project, context={"size": size}, say=Steps(), engine_dir=root / "docker"
    )
    try:
        deployed = await deployment.start()
        key = deployment.supervisor.root / _KEY
        key.touch(mode=0o600)
        key.write_text(await deployment.make_key(deployed, "local", "developer"))
        out.print("\n[bold]sandfleet is deployed[/] on an emulator (docs/deploy.md says what that proves)")
        out.print(f"API Gateway, Lambda:    {deployed.url}")
        out.print(
            f"Load balancer, gateway: {deployed.stream_url}  (streams; API Gateway of an emulator does not)"
        )
        out.print(f"AWS endpoint:           {deployed.endpoint}")
        out.print(f"API key:                {key}")
        out.print(f"Logs:                   {deployment.supervisor.logs}")
        out.print(f'Try:                    curl -H "x-api-key: $(cat {key})" {deployed.url}/info')
        out.print(
            f'                        SANDFLEET_API_URL={deployed.stream_url} SANDFLEET_API_KEY="$(cat {key})" '
            "sandfleet run 'Say hi'"
        )
        out.print("Ctrl-C removes everything.")
        await asyncio.Event().wait()
    finally:
        began = deployment.supervisor.holds_folder
        for thing in await deployment.stop():
            out.print(f"Removed by force: {thing}")
        if began:
            out.print("Removed.")
    return 0
