"""The chat model of the examples, chosen by the environment.

``SANDFLEET_MODEL`` takes any `init_chat_model` name, e.g. ``openai:gpt-5-mini`` or ``anthropic:claude-sonnet-4-5``; the
provider's own variables (``OPENAI_API_KEY``, …) hold the key. Without it, ``SANDFLEET_PROVIDER_URL`` is the base URL of
an OpenAI-compatible server, which the local stack sets to its scripted provider.
"""

import os

from langchain.chat_models import init_chat_model
from langchain_core.language_models import BaseChatModel

# 429, 5xx, timeouts and lost connections are tried again by the provider's client, which reads Retry-After.
_MAX_RETRIES = 4


def chat_model(scripted_name: str) -> BaseChatModel:
    """The model to talk to; ``scripted_name`` is the scripted provider's model if that is the one used.

    Raises RuntimeError when the environment names no model.
    """
    name = os.environ.get("SANDFLEET_MODEL")
    if name:
        return init_chat_model(name, max_retries=_MAX_RETRIES)
    base_url = os.environ.get("SANDFLEET_PROVIDER_URL")
    if not base_url:
        raise RuntimeError(
            "No model: set SANDFLEET_MODEL (e.g. openai:gpt-5-mini, with OPENAI_API_KEY), or SANDFLEET_PROVIDER_URL "
            "to the base URL of an OpenAI-compatible server such as http://127.0.0.1:8000/v1."
        )
    from langchain_openai import ChatOpenAI
    from openai import DefaultAioHttpClient

    return ChatOpenAI(
        model=scripted_name,
        base_url=base_url,
        api_key="scripted",
        streaming=True,
        use_responses_api=False,
        max_retries=_MAX_RETRIES,
        # aiohttp takes half the CPU of the default transport, which is most of what a short call costs.
        http_async_client=DefaultAioHttpClient(),
        # A timer per chunk costs more than the chunk; the run's own timeout bounds a stalled stream.
        stream_chunk_timeout=None,
    )
