"""A slow disk, so that a kill at a random moment meets a checkpoint half written or half deleted.

Every process that has this folder on its import path flushes a file in 30 ms at least. The thread that deletes
checkpoints takes 50 ms for each file.
"""

import os
import threading
import time

_fsync, _unlink = os.fsync, os.unlink


def _slow_fsync(descriptor):
    time.sleep(0.03)
    return _fsync(descriptor)


def _slow_unlink(*args, **options):
    if threading.current_thread().name == "delete-checkpoints":
        time.sleep(0.05)
    return _unlink(*args, **options)


os.fsync, os.unlink = _slow_fsync, _slow_unlink
