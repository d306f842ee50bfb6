"""Executions of single runs."""
