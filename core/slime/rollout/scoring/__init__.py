"""Calls rewards where they can do no harm: in worker processes that are killed when they hang, and replaced.

A run's process talks to each worker over a socket (`frames`), and both look at a few shared bytes that say which call
the worker is in (`board`).  Nothing here knows what is done with a reward: `slime.rollout.rewards` does.

In the run's process: `pool` → `worker_handle` → `launcher`, or `in_loop` for rewards that cannot block.
In the process that workers are forked from: `template`.  Inside a worker: `worker` → `serve_sync` or `serve_async`.
"""
