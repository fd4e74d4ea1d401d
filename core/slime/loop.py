"""The loops.  Read top to bottom: this page is what slime does.

Every verb is a method of `slime.cluster.run.Run`; which algorithm, reward, data source and generator take
part is the plugins' business and appears nowhere here.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path

from slime.cluster.ending import ending_on_sigterm
from slime.cluster.run import PendingRollout, Run
from slime.config import RunConfig
from slime.observe.observer import RunObserver
from slime.plugins import PluginSet


def train_synchronously(run: Run) -> None:
    """generate -> train -> sync weights -> evaluate and save where due, one rollout after the other."""
    run.sync_weights()
    if evaluates_before_training(run):
        run.evaluate(run.first_rollout)
    for number in range(run.first_rollout, run.config.num_rollout):
        run.start_step()
        rollout = run.generate(number)  # data source -> generator -> engines -> reward -> batch
        metrics = run.train(rollout)  # log-probs -> estimator -> objective -> optimizer
        run.sync_weights()  # trainer -> engines, version + 1
        run.finish_step(rollout, metrics)
        if evaluation_due(run, number + 1):
            run.evaluate(number + 1)
        save_where_due(run, done=number + 1)


def train_asynchronously(run: Run) -> None:
    """As above, but up to `--async-buffer-size` later rollouts are generated while one is trained on.

    The engines keep their running requests over a weight sync, so a response may span several weight
    versions; every sample records which.  Evaluations go on beside generation and training, up to the next
    sync, which waits for them: their responses are of one version.
    """
    run.sync_weights()
    if evaluates_before_training(run):
        run.start_evaluation(run.first_rollout)
    buffer: deque[PendingRollout] = deque()
    ahead = run.config.rollout.async_buffer_size
    for number in range(run.first_rollout, run.config.num_rollout):
        run.start_step()
        for later in range(number + len(buffer), min(number + 1 + ahead, run.config.num_rollout)):
            buffer.append(run.start_generation(later))
        rollout = run.wait_generation(buffer.popleft())
        metrics = run.train(rollout)
        done = number + 1
        if done % run.config.rollout.update_weights_interval == 0 or evaluation_due(run, done):
            run.sync_weights()
        run.finish_step(rollout, metrics)
        run.finish_evaluation(wait=False)
        if evaluation_due(run, done):
            run.start_evaluation(done)
        save_where_due(run, done=done)
    run.finish_evaluation()


def evaluation_due(run: Run, done: int) -> bool:
    """Whether the held-out sets are scored after `done` rollouts: every so many, and after the last."""
    every = run.config.evaluation.eval_interval
    return every is not None and (done == run.config.num_rollout or done % every == 0)


def evaluates_before_training(run: Run) -> bool:
    """Whether the held-out sets are scored where the run starts from."""
    return run.config.evaluation.eval_interval is not None and not run.config.evaluation.skip_eval_before_train


def save_where_due(run: Run, *, done: int) -> None:
    """Checkpoint every so many rollouts, and after the last."""
    last = done == run.config.num_rollout
    if last or ((every := run.config.checkpoint.save_interval) and done % every == 0):
        run.save(done)
    if last:
        run.export_hf(done)


def main(config: RunConfig, run_dir: Path, plugins: PluginSet) -> int:
    """Run `config` to its end.  Ctrl-C and SIGTERM end it in order; errors propagate after clean-up."""
    observer = RunObserver(config, run_dir, plugins)
    outcome = "failed"
    try:
        with ending_on_sigterm(), Run(config, run_dir, plugins, observer) as run:
            (train_asynchronously if config.rollout.async_mode else train_synchronously)(run)
        outcome = "finished"
    except KeyboardInterrupt:
        outcome = "interrupted"
        raise
    finally:
        observer.run_finished(outcome)
    return 0
