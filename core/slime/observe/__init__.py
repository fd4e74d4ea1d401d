"""Shows what a run is doing: metrics, trackers, terminal, readable rollouts, report.

Everything here only watches. Nothing in this room changes what a run computes, and a sink that cannot write (a full
disk, say) is reported once and never ends the run.
"""
