"""Real runs with one fault each: how soon it is found, what is said, and how the run ends."""
