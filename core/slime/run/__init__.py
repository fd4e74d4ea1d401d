"""One run on Ray: its processes, where they are placed, its checkpoints and its end."""

import os

# Ray reads this while it is imported. Without it, a driver whose parent is process 1 (as in most containers) exits
# without a word when the local raylet dies: Ray then takes that parent for a sign that the driver is an orphan.
os.environ.setdefault("RAY_RAYLET_PID", str(os.getpid()))
