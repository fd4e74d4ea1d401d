"""Turns prompts into finished groups: generated, scored, and exactly one batch at a time.

All asyncio, in one process, without Ray.  What goes wrong with one sample is written on that sample
(`Status.FAILED` or `ABORTED`, and `Sample.failure`); it stays visible and never enters a batch.  What goes
wrong with the engines ends the rollout: `EngineError` is never turned into a failed sample.
"""
