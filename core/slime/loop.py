"""The loops. Read top to bottom: this page is what slime does.

Each step is a method of `slime.run.run.Run`, or with `--colocate` of `slime.run.colocation.ColocatedRun`. What
researchers vary comes from plugins; this page names none of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slime.run.run import Run


def train_synchronously(run: Run) -> None:
    """generate -> train -> sync weights -> evaluate and save where due, one rollout after the other."""
    run.sync_weights()
    if evaluates_before_training(run):
        run.evaluate(run.first_rollout)
    for number in range(run.first_rollout, run.config.num_rollout):
        run.stop_if_preempted(number)  # after SIGTERM
        run.start_step(number)
        rollout = run.generate(number)  # data source -> generator -> engines -> reward -> batch
        metrics = run.train(rollout)  # log-probs -> estimator -> objective -> optimizer
        run.sync_weights()  # trainer -> engines, version + 1; colocated engines get it when they next generate
        run.finish_step(rollout, metrics)
        run.stop_if_preempted(number + 1)
        if evaluation_due(run, number + 1):
            run.evaluate(number + 1)
        save_where_due(run, done=number + 1)


def train_asynchronously(run: Run) -> None:
    """As above, but up to `--async-buffer-size` later rollouts are generated while one is trained on.

    With `--max-staleness` a rollout waits for weights that are fresh enough to generate it. The engines keep their
    running requests over a weight sync, so a response may span several weight versions; every sample records which.
    Evaluations run alongside generation and training, up to the next sync, which waits for them: their responses are
    of one version.
    """
    run.sync_weights()
    if evaluates_before_training(run):
        run.start_evaluation(run.first_rollout)
    started, ahead = run.first_rollout, run.config.rollout.async_buffer_size
    for number in range(run.first_rollout, run.config.num_rollout):
        run.stop_if_preempted(number)
        run.start_step(number)
        while started < min(number + 1 + ahead, run.config.num_rollout) and run.fresh_enough(started):
            run.start_generation(started)
            started += 1
        rollout = run.wait_generation(number)
        metrics = run.train(rollout)
        done = number + 1
        if done % run.config.rollout.update_weights_interval == 0 or evaluation_due(run, done):
            run.sync_weights()
        run.finish_step(rollout, metrics)
        run.stop_if_preempted(done)
        run.finish_evaluation(wait=False)
        if evaluation_due(run, done):
            run.start_evaluation(done)
        save_where_due(run, done=done)
    run.finish_evaluation()


def evaluation_due(run: Run, done: int) -> bool:
    """Whether the held-out sets are scored after `done` rollouts: every `--eval-interval`, and after the last."""
    every = run.config.evaluation.eval_interval
    return every is not None and (done == run.config.num_rollout or done % every == 0)


def evaluates_before_training(run: Run) -> bool:
    """Whether the held-out sets are scored before the first step. A continued run does so if that is due after the
    rollouts before: the run that it continues may have been ended before its evaluation was finished."""
    options = run.config.evaluation
    if run.first_rollout > 0:
        return evaluation_due(run, run.first_rollout)
    return options.eval_interval is not None and not options.skip_eval_before_train


def save_where_due(run: Run, *, done: int) -> None:
    """Save a checkpoint every `--save-interval` rollouts and after the last, and export to `--save-hf`.

    With `--async-save` a checkpoint is written while training continues, and a later call completes it. Weights are
    exported after the last rollout, and at each interval if `--save-hf` names a folder for each of them.
    """
    options, last = run.config.checkpoint, done == run.config.num_rollout
    run.finish_save(wait=False)
    if last or (options.save_interval and done % options.save_interval == 0):
        run.finish_evaluation(before=done)  # a run that is continued from here does not repeat it
        run.save(done)
        export_where_due(run, done)


def export_where_due(run: Run, done: int) -> None:
    """Export to `--save-hf` after the last rollout, and at other checkpoints if it names a folder for each."""
    options = run.config.checkpoint
    if options.save_hf is not None and (done == run.config.num_rollout or options.exports_each):
        run.export_hf(Path(options.save_hf.format(rollout=done)))
