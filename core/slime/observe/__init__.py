"""Shows what a run is doing: metrics, TensorBoard, terminal, readable rollouts, report.

Everything here only watches.  Nothing in this room changes what a run computes, and a sink that cannot
write (a full disk, say) is reported once and never ends the run.
"""

from slime.observe.excerpt import Excerpt, excerpts_of
from slime.observe.memory import PeakMemory, gibibytes
from slime.observe.metrics import MetricsWriter, read_metrics
from slime.observe.observer import RunObserver
from slime.observe.report import write_report
from slime.observe.rollout_files import write_eval, write_rollout
from slime.observe.terminal import Terminal
from slime.observe.timing import kernel_overhead

__all__ = [
    "Excerpt",
    "MetricsWriter",
    "PeakMemory",
    "RunObserver",
    "Terminal",
    "excerpts_of",
    "gibibytes",
    "kernel_overhead",
    "read_metrics",
    "write_eval",
    "write_report",
    "write_rollout",
]
