"""Runs a user's agent: a Python function or a program that needs only the address of an endpoint."""
