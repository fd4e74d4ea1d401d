"""Ray: starts the processes of a run, places them on devices, waits for them with deadlines, ends them.

`Run` (run.py) is what the loops see: verbs over three groups of actors (engines, trainer ranks, rollout).
"""
