"""The whole run's state on disk, saved and restored as one thing: trainer, data cursor, configuration, plugins."""
