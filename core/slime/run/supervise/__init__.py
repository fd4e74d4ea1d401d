"""Notices which process of a run has died or hangs, names it, and starts again what can be started again.

`losses` is the table of what a loss is called and leads to. `watch` looks at all processes in every wait of the driver,
through `processes`, which judges those of one machine. `traces` reads what they left behind, and `ray_errors` says what
Ray saw. `recovery` restarts engines and the router while the run goes on, `restarts` the run as a whole.
"""
