"""What the commands call: a whole run, an evaluation, an export. Ctrl-C and SIGTERM end each of them cleanly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from slime.config import RunConfig
from slime.errors import PreemptedError
from slime.loop import export_where_due, train_asynchronously, train_synchronously
from slime.observe.observer import EvaluationObserver, RunObserver
from slime.registry.plugin_set import PluginSet
from slime.run.checkpoint.read import Checkpoint
from slime.run.colocation import ColocatedRun
from slime.run.preemption import Preemption
from slime.run.ray_session import ray_session
from slime.run.run import Run
from slime.run.signals import ending_on_signals
from slime.run.supervise.restarts import run_with_restarts


def train(config: RunConfig, run_dir: Path, plugins: PluginSet, begins: Callable[[RunConfig], None]) -> int:
    """`slime train`: run `config` to its end, with `--use-fault-tolerance` in several attempts if need be.

    Args:
        config: The run.
        run_dir: The run folder.
        plugins: The driver's plugins.
        begins: Called with the configuration of each attempt when its processes have started and loaded what it
            continues from: until then, nothing of an earlier run is changed.
    """
    observer, preemption = RunObserver(config, run_dir, plugins), Preemption(config, run_dir)

    def attempt(config: RunConfig) -> None:
        observer.starting("Ray")
        kind = ColocatedRun if config.cluster.colocate else Run  # engines and trainer take turns on the same devices
        with ray_session(config), kind(config, run_dir, plugins, observer, preemption) as run, preemption.accepted():
            begins(config)
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
        observer.run_finished(outcome, reports=not preemption.asked)
        preemption.close()
    return 0


def evaluate(
    config: RunConfig, run_dir: Path, plugins: PluginSet, checkpoint: Checkpoint | None, exporting: RunConfig
) -> int:
    """`slime eval`: score the held-out sets once, in a run without a trainer.

    The weights of a `checkpoint` are exported to a model folder first, by the trainer that `exporting` describes.
    """
    model = config.checkpoint.hf_checkpoint if checkpoint is None else checkpoint.path
    with _told(config, run_dir, model) as observer, TemporaryDirectory(dir=run_dir, prefix=".model-") as made:
        if checkpoint is not None:
            export_checkpoint(exporting, run_dir, plugins, observer, Path(made, "hf"))
            config = config.with_options("checkpoint", hf_checkpoint=str(Path(made, "hf")))
        with Run(config, run_dir, plugins, observer, roles={"engines", "rollout"}) as run:
            run.evaluate(0 if checkpoint is None else checkpoint.rollouts_done)
    return 0


def export(exporting: RunConfig, run_dir: Path, plugins: PluginSet, folder: Path) -> int:
    """`slime convert` of adapters: merge the weights that `exporting` starts from into a Hugging Face folder."""
    with _told(exporting, run_dir, folder) as observer:
        export_checkpoint(exporting, run_dir, plugins, observer, folder)
    return 0


def convert_to_megatron(config: RunConfig, run_dir: Path, plugins: PluginSet, root: Path) -> int:
    """`slime convert --to-megatron`: write the model of `config` as a checkpoint in `root`, by its training ranks."""
    with (
        _told(config, run_dir, root) as observer,
        Run(config, run_dir, plugins, observer, roles={"trainer"}) as run,
    ):
        run.save_model(root)
    return 0


@contextmanager
def _told(config: RunConfig, run_dir: Path, model: str | Path | None) -> Iterator[EvaluationObserver]:
    """Ray for a run that does not train, whose observer names a `model`."""
    observer = EvaluationObserver(config, run_dir, str(model))
    observer.starting("Ray")
    with observer, ending_on_signals(), ray_session(config):
        yield observer


def export_checkpoint(
    exporting: RunConfig, run_dir: Path, plugins: PluginSet, observer: RunObserver, folder: Path
) -> None:
    """Load the checkpoint that `exporting` starts from and write it to `folder`, in a run with only a trainer."""
    with Run(exporting, run_dir, plugins, observer, roles={"trainer"}) as run:
        run.export_hf(folder)
