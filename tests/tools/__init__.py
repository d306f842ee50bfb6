"""Tests of the ledger of tool calls."""
