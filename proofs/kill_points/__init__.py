"""`make kill-points`: runs that are killed at a random moment and continued equal one that was not, bit for bit."""
