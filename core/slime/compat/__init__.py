"""Functions and classes given by path, as components: one adapter for each way in which they may be called."""
