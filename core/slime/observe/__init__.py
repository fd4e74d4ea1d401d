"""Shows what a run is doing: metrics, trackers, terminal, readable rollouts, report.

Nothing here changes what a run computes. If something cannot be written, because the disk is full for example, this is
reported once, and the run goes on.
"""
