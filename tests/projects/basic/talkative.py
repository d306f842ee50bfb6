"""Calls the scripted model ``times`` times in one node, one call after the other, ``pause_ms`` apart.

Input ``{"id": "…", "times": 5, "pause_ms": 100}``; the provider lists the calls under the correlation id ``id``. No
checkpoint is written in between, so nothing but the lease keeps the node from its next call.
"""

import asyncio
import os
from typing import TypedDict

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph

model = ChatOpenAI(
    model="scripted",
    base_url=os.environ.get("SANDFLEET_PROVIDER_URL", "http://127.0.0.1:9/v1"),
    api_key="scripted",
    streaming=True,
    max_retries=4,
)


class State(TypedDict, total=False):
    id: str
    times: int
    pause_ms: float
    answers: int


async def talk(state: State) -> State:
    for _ in range(state["times"]):
        await model.ainvoke(f"hi #id:{state['id']}")
        await asyncio.sleep(state.get("pause_ms", 0) / 1000)
    return {"answers": state["times"]}


builder = StateGraph(State)
builder.add_node("talk", talk)
builder.add_edge(START, "talk")
builder.add_edge("talk", END)
graph = builder.compile()
