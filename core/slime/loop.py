"""The loops. Read top to bottom: this page is what slime does.

Each step is a method of `slime.run.run.Run`. Algorithms, rewards, data sources and generators come from plugins; this
page names none of them.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from slime.config import RunConfig
from slime.errors import PreemptedError
from slime.observe.observer import EvaluationObserver, RunObserver
from slime.plugins.plugin_set import PluginSet
from slime.run.checkpoint import Checkpoint
from slime.run.colocation import ColocatedRun
from slime.run.preemption import Preemption
from slime.run.ray_session import ray_session
from slime.run.restarts import run_with_restarts
from slime.run.run import Run
from slime.run.signals import ending_on_signals


def train_synchronously(run: Run) -> None:
    """generate -> train -> sync weights -> evaluate and save where due, one rollout after the other."""
    run.sync_weights()
    if evaluates_before_training(run):
        run.evaluate(run.first_rollout)
    for number in range(run.first_rollout, run.config.num_rollout):
        run.stop_if_preempted(number)  # after SIGTERM
        run.start_step()
        rollout = run.generate(number)  # data source -> generator -> engines -> reward -> batch
        metrics = run.train(rollout)  # log-probs -> estimator -> objective -> optimizer
        run.sync_weights()  # trainer -> engines, version + 1
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
        run.start_step()
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


# --- called by the commands: Ctrl-C and SIGTERM end each cleanly; errors propagate after clean-up ----------------


def main(config: RunConfig, run_dir: Path, plugins: PluginSet) -> int:
    """`slime train`: run `config` to its end, with `--use-fault-tolerance` in several attempts if need be."""
    observer, preemption = RunObserver(config, run_dir, plugins), Preemption(config, run_dir)

    def attempt(config: RunConfig) -> None:
        observer.starting("Ray")
        kind = ColocatedRun if config.cluster.colocate else Run  # engines and trainer take turns on the same devices
        with ray_session(config), kind(config, run_dir, plugins, observer, preemption) as run, preemption.accepted():
            (train_asynchronously if config.rollout.async_mode else train_synchronously)(run)
            if run.first_rollout == config.num_rollout:  # an earlier attempt ended after its last checkpoint
                export_where_due(run, config.num_rollout)

    outcome = "failed"
    try:
        with preemption.explaining(), ending_on_signals(preemption) as interrupted:
            run_with_restarts(attempt, config, observer, unless=lambda: preemption.asked or interrupted.is_set())
        outcome = "finished"
    except (KeyboardInterrupt, PreemptedError):
        outcome = "interrupted"
        raise
    finally:
        observer.run_finished(outcome, page=not preemption.asked)
        preemption.close()
    return 0


def evaluate(
    config: RunConfig, run_dir: Path, plugins: PluginSet, checkpoint: Checkpoint | None, exporting: RunConfig
) -> int:
    """`slime eval`: score the held-out sets once, in a run without a trainer.

    The weights of a `checkpoint` are exported to a model folder first, by the trainer that `exporting` describes.
    """
    model = config.checkpoint.hf_checkpoint if checkpoint is None else checkpoint.path
    observer = EvaluationObserver(config, run_dir, str(model))
    observer.starting("Ray")
    with observer, ending_on_signals(), ray_session(config), TemporaryDirectory(dir=run_dir, prefix=".model-") as made:
        if checkpoint is not None:
            export_checkpoint(exporting, run_dir, plugins, observer, Path(made, "hf"))
            placed = config.checkpoint.model_copy(update={"hf_checkpoint": str(Path(made, "hf"))})
            config = config.model_copy(update={"checkpoint": placed})
        with Run(config, run_dir, plugins, observer, roles={"engines", "rollout"}) as run:
            run.evaluate(0 if checkpoint is None else checkpoint.rollouts_done)
    return 0


def export(exporting: RunConfig, run_dir: Path, plugins: PluginSet, folder: Path) -> int:
    """`slime convert` of adapters: merge the weights that `exporting` starts from into a Hugging Face folder."""
    observer = EvaluationObserver(exporting, run_dir, str(folder))
    observer.starting("Ray")
    with observer, ending_on_signals(), ray_session(exporting):
        export_checkpoint(exporting, run_dir, plugins, observer, folder)
    return 0


def convert_to_megatron(config: RunConfig, run_dir: Path, plugins: PluginSet, root: Path) -> int:
    """`slime convert --to-megatron`: write the model of `config` as a checkpoint in `root`, by its training ranks."""
    observer = EvaluationObserver(config, run_dir, str(root))
    observer.starting("Ray")
    with (
        observer,
        ending_on_signals(),
        ray_session(config),
        Run(config, run_dir, plugins, observer, roles={"trainer"}) as run,
    ):
        run.save_model(root)
    return 0


def export_checkpoint(
    exporting: RunConfig, run_dir: Path, plugins: PluginSet, observer: RunObserver, folder: Path
) -> None:
    """Load the checkpoint that `exporting` starts from and write it to `folder`, in a run with only a trainer."""
    with Run(exporting, run_dir, plugins, observer, roles={"trainer"}) as run:
        run.export_hf(folder)
