"""An agent that writes programs and runs them in its own sandbox."""

from chat_model import chat_model
from langchain.agents import create_agent

from sandfleet.fleet.sandbox.tools import sandbox_tools

graph = create_agent(
    chat_model("scripted-coder"),
    sandbox_tools,
    system_prompt=(
        "You solve tasks by writing small Python programs. Write the program to a file, run it with `execute`, look at "
        "its output, correct it if needed, and answer with what it printed. You have Python's standard library and no "
        "network."
    ),
    name="coder",
)
