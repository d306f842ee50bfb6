"""A deep agent: it plans, delegates to subagents, and works on files and with commands in the run's own sandbox.

pip install 'sandfleet[deepagents]'                  # from a checkout: make install-dev
.venv/bin/sandfleet dev --project examples/deep
.venv/bin/sandfleet run --assistant deep "Which numbers below 100 are prime? Find out with a program."
"""

from chat_model import chat_model
from deepagents import create_deep_agent

from sandfleet.fleet.deepagents import sandbox_backend

graph = create_deep_agent(
    chat_model("scripted-deep"),
    system_prompt=(
        "You solve tasks by writing small Python programs. Your files are below /workspace. Write the program there, run "
        "it with `execute`, look at its output, correct it if needed, and answer with what it printed. You have Python's "
        "standard library and no network."
    ),
    backend=sandbox_backend(),
    name="deep",
)
