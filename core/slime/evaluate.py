"""Scores held-out prompts alone: what `slime eval` does once everything is checked."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from slime.cluster.ending import ending_on_sigterm
from slime.cluster.eval_run import EvaluationRun, export_checkpoint
from slime.cluster.session import RaySession
from slime.config import RunConfig
from slime.config.eval_sets import eval_sets
from slime.observe.eval_results import write_results
from slime.observe.observer import samples_lost
from slime.observe.terminal import Terminal
from slime.plugins import PluginSet

if TYPE_CHECKING:
    from slime.checkpoint.folder import Checkpoint


def evaluate(
    config: RunConfig, run_dir: Path, plugins: PluginSet, checkpoint: Checkpoint | None, exporting: RunConfig
) -> int:
    """Score the held-out sets of `config` and end: no training.

    Of a `checkpoint` a model folder is made first, by training ranks that `exporting` describes.  Ctrl-C and SIGTERM
    end it in order; errors propagate after clean-up.
    """
    terminal = Terminal()
    model, done = config.checkpoint.hf_checkpoint, 0
    try:
        with (
            ending_on_sigterm(),
            RaySession(config, trains=False),
            TemporaryDirectory(dir=run_dir, prefix=".model-") as folder,
        ):
            if checkpoint is not None:
                model, done = str(checkpoint.path), checkpoint.rollouts_done
                terminal.say(f"making a model folder of {model}", "dim")
                made = Path(folder) / "hf"
                export_checkpoint(checkpoint, exporting, run_dir, plugins, made)
                placed = config.checkpoint.model_copy(update={"hf_checkpoint": str(made)})
                config = config.model_copy(update={"checkpoint": placed})
            terminal.say(f"starting {config.num_engines} engine(s), router, rollout process", "dim")
            with EvaluationRun(config, run_dir, plugins) as run:
                report = run.evaluate(done, lambda n, total: terminal.progress("evaluating", n, total))
    finally:
        terminal.close()
    told = {"weights": model, "rollouts_done": done, "seconds": report.seconds, "failures": report.failures}
    path = write_results(run_dir, eval_sets(config), report.metrics, report.files, **told)
    terminal.eval_finished(f"of {model}", report.metrics, report.seconds)
    terminal.samples_lost("evaluation", *samples_lost(report.metrics), report.failures)
    terminal.say(f"every number: {path}  every sample: {path.parent / 'rollouts'}", "dim")
    return 0
