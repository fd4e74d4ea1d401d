"""Turns prompts into batches: generated, scored, filtered, and exactly one batch for every rollout.

All of it is asyncio, without Ray, in the one process of `RolloutProcess` (`slime.run`). What goes wrong with one sample
is written on that sample (`Status.FAILED` or `ABORTED`, and `Sample.failure`): it stays visible and is not trained on.
What goes wrong with the engines ends the rollout: `EngineError` never becomes a failed sample.
"""
