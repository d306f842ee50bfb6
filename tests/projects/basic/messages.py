"""A chat without an agent: one node that calls the scripted model with the thread's messages."""

import os
from typing import Any

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph

model = ChatOpenAI(
    model="scripted",
    base_url=os.environ.get("SANDFLEET_PROVIDER_URL", "http://127.0.0.1:9/v1"),
    api_key="scripted",
    streaming=True,
    max_retries=4,
)


async def chat(state: MessagesState) -> dict[str, Any]:
    return {"messages": [await model.ainvoke(state["messages"])]}


builder = StateGraph(MessagesState)
builder.add_node("chat", chat)
builder.add_edge(START, "chat")
builder.add_edge("chat", END)
graph = builder.compile()
