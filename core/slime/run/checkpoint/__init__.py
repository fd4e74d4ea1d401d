"""Checkpoint folders: `ROOT/rollout_000010/`, complete or absent, and `ROOT/latest` naming the newest.

    megatron/      model, optimizer, scheduler, random states (written by the trainer ranks)
    rollout/       data source, replay buffer, prompts in flight (written by the rollout process)
    state.json     rollouts done, weight versions, what the data order depends on, the model, size and sha256 of every
                   other file
    config.toml    the resolved run configuration
    plugins.json   the plugins the run used

A checkpoint is written under a temporary name and renamed when every part is on disk, so that a crash while saving
leaves the previous one untouched. One that replaces another of the same number moves that one aside first, to
`.rollout_000010.replaced`: a run killed at this moment left the complete old one there, where it is found. One that is
no longer kept is renamed to `.rollout_000010.partial` first: half deleted, it is not taken for a checkpoint.

Checkpoints are not trusted: everything that is read from them is JSON, TOML or tensors, checked by type.
"""
