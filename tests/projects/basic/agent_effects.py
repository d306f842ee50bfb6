"""An agent of `create_agent` whose tool appends a line to the file that ``configurable.path`` names.

The scripted model decides what it calls. ``append`` is a plain async tool; ``whoami`` tells whom a tool works for.
"""

import os
from pathlib import Path

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import ToolRuntime

from sandfleet.fleet.tools import current_call


@tool
async def append(line: str, runtime: ToolRuntime) -> str:
    """Append a line."""
    with Path(runtime.config["configurable"]["path"]).open("a") as file:
        file.write(line + "\n")
    return f"appended {line}"


@tool
def whoami() -> str:
    """Say whom this call is for."""
    call = current_call()
    return f"{call.tenant}/{call.user_id}/{call.run_id}"


graph = create_agent(
    ChatOpenAI(
        model="scripted",
        base_url=os.environ.get("SANDFLEET_PROVIDER_URL", "http://127.0.0.1:9/v1"),
        api_key="scripted",
        streaming=True,
        max_retries=4,
    ),
    tools=[append, whoami],
)
