"""Environments of the `verifiers` package, run unmodified in a separate process."""
