"""Environments of the `verifiers` package, run unchanged in a process of their own."""
