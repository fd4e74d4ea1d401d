"""One run on Ray: its processes, where they are placed, its checkpoints and its end."""
