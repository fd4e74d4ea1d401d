"""`make soak`: whether anything grows in a run of thousands of steps."""
