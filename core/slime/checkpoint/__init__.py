"""The whole run's state on disk, saved and restored as one thing: trainer, prompts, configuration, plugins."""
