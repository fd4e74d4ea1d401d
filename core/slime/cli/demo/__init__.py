"""The small run of `slime view --demo`: `main` makes a model and questions and starts it, with `run.toml`."""
