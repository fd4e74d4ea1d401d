"""Calls a user's agent: a Python function or a program, which knows nothing of slime but an address."""
