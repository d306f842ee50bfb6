"""The smallest agent: a model and nothing else."""

from chat_model import chat_model
from langchain.agents import create_agent

graph = create_agent(
    chat_model("scripted"),
    system_prompt="You are a friendly assistant. Answer briefly.",
    name="hello",
)
