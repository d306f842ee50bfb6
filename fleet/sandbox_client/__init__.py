"""Sandboxes for a program that is no run: a client of the HTTP API, which needs nothing else of sandfleet.

from sandfleet.fleet.sandbox_client import SandboxApi

async with SandboxApi("http://127.0.0.1:8123", "sf_…") as api, await api.create() as sandbox:
    result = await sandbox.exec("echo hello")
"""

from sandfleet.fleet.sandbox_client.api import SandboxApi
from sandfleet.fleet.sandbox_client.errors import ApiError, SandboxLost
from sandfleet.fleet.sandbox_client.process import Process
from sandfleet.fleet.sandbox_client.sandbox import ExecResult, Sandbox

__all__ = ["ApiError", "ExecResult", "Process", "Sandbox", "SandboxApi", "SandboxLost"]
