"""A scripted, OpenAI-compatible model provider: real HTTP, chosen behaviour, very little CPU per request."""
