"""Child processes that never outlive their parent, and pools of workers that are killed and replaced when they hang.

`child` starts a process in a new process group, kills the group, and makes it end with its parent.
`fork_server` forks processes from one that has done the slow imports. `pool` distributes calls among workers:
`worker_handle` is the parent's side of a worker, `worker` the program that runs in it, `frames` their messages.
`garbage` says when long-lived processes look for garbage, and gives back freed memory.
"""

from typing import TypeAlias

from slime.kit.processes.child import (
    SHORT_SPINS,
    DirectChild,
    describe_exit,
    end_with_parent,
    kill_group,
    living_members,
)
from slime.kit.processes.fork_server import ForkedChild, ForkServer, in_memory_file
from slime.kit.processes.garbage import COLLECT_AFTER, collect_seldom, keep_out_of_collections, return_freed
from slime.kit.processes.pool import CallFailedError, CallRaisedError, CallTimedOutError, WorkerPool

#: a process that leads its own process group, and dies when it is closed or its parent ends
Child: TypeAlias = DirectChild | ForkedChild

__all__ = [
    "COLLECT_AFTER",
    "SHORT_SPINS",
    "CallFailedError",
    "CallRaisedError",
    "CallTimedOutError",
    "Child",
    "DirectChild",
    "ForkServer",
    "ForkedChild",
    "WorkerPool",
    "collect_seldom",
    "describe_exit",
    "end_with_parent",
    "in_memory_file",
    "keep_out_of_collections",
    "kill_group",
    "living_members",
    "return_freed",
]
