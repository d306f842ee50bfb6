"""An agent whose model counts tokens, with the sandbox's tools, one that fails, and one that says what it was given.

``refuse`` raises an error with its argument in the message, which ends the run.
"""

import os

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from sandfleet.fleet.sandbox.tools import sandbox_tools


@tool
async def refuse(what: str) -> str:
    """Fail."""
    raise RuntimeError(f"refused {what}")


graph = create_agent(
    ChatOpenAI(
        model="scripted",
        base_url=os.environ.get("SANDFLEET_PROVIDER_URL", "http://127.0.0.1:9/v1"),
        api_key="scripted",
        streaming=True,
        stream_usage=True,
        max_retries=4,
    ),
    tools=[*sandbox_tools, refuse],
)
