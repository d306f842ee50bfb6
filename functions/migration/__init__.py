"""Migrations of the schema during a deployment."""
