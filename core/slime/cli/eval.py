"""`slime eval`: score a model, or a run's checkpoint, on held-out prompts."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence

from slime.cli.eval_config import EvalRequest, eval_problems, read_request
from slime.cli.help_text import block, entry, metavar
from slime.cli.preflight import Preflight, preflight
from slime.cli.train import make_run_folder, run_folder
from slime.config.eval_checks import evaluation_notes
from slime.config.eval_sets import EvalSetSettings, eval_sets
from slime.config.flags import Flag
from slime.config.options import SECTIONS
from slime.config.own_flags import flag_table

_USAGE = """\
usage: slime eval [RUN.toml | CHECKPOINT | MODEL] [--flag value]...

Score held-out prompts and print a table: mean reward, pass@k and 95% intervals of every evaluation set.

  RUN.toml              a run file: its evaluation sets, reward and --hf-checkpoint (with --load: that checkpoint)
  CHECKPOINT            a folder of --save, or one checkpoint in it: the saved run's options and weights
  MODEL                 a Hugging Face model folder: --hf-checkpoint

  --dry-run             check everything, say what would be evaluated, start nothing
  --help                this text

The options are those of `slime train` (its --help lists them all); what is about training is left alone.  Engines
are started for the model folder itself; of a checkpoint a model folder is made first, by training ranks in the
layout that its run had, and removed at the end.

Written to OUTPUT_DIR/RUN_NAME: results.json (every number), rollouts/eval_SET_N.jsonl (every sample; N: rollouts the
weights were trained on), config.toml and logs/.  Exit code: 0 evaluated, 1 failed, 2 bad input.
"""
_DRY_RUN = "--dry-run"
_HELP_SECTIONS = ("evaluation", "reward")
_HELP_FLAGS = ("hf-checkpoint", "load", "output-dir", "run-name", "generator", "rollout-concurrency", "device")
#: what is about training in these sections
_HELP_WITHOUT = ("eval-interval", "skip-eval-before-train", "custom-reward-post-process-path")
#: what means something else here than in training
_HELP_TEXTS = {
    "hf-checkpoint": "Hugging Face model folder: what is evaluated, or what the checkpoint was trained from",
    "load": "evaluate this checkpoint, or the newest in this folder",
    "run-name": "name of the folder of the results; default: eval_ with date and time",
    "generator": "generator component",
    "reward": "reward component of the sets that have none of their own; --rm-type is the same",
}


def run(argv: Sequence[str]) -> int:
    """The command.  Raises `ConfigError` before any process starts, and what the evaluation itself raises."""
    if "--help" in argv or "-h" in argv:
        print(_help())
        return 0
    name = time.strftime("eval_%Y-%m-%d_%H%M%S")
    request = read_request([word for word in argv if word != _DRY_RUN], name)
    checked = preflight(request.config, run_folder(request.config), problems_of=eval_problems, trains=False)
    notes = list(evaluation_notes(request.config))
    if _DRY_RUN in argv:
        print("\n".join(_plan(request, checked, notes)))
        return 0
    for note in notes:
        print(f"slime: note: {note}", file=sys.stderr)
    make_run_folder(checked.run_dir, checked.config)

    # It brings Ray with it; nothing above this line needs it.
    from slime import evaluate

    return evaluate.evaluate(checked.config, checked.run_dir, checked.plugins, request.checkpoint, request.exporting)


def _plan(request: EvalRequest, checked: Preflight, notes: list[str]) -> Iterator[str]:
    yield f"run folder   {checked.run_dir}"
    yield f"weights      {request.what}"
    yield f"model        {checked.model}"
    for facts in checked.data:
        yield f"data         {facts.name}: {facts}"
    for one in eval_sets(request.config):
        yield f"evaluation   {_set_in_words(one)}"
    for slot, used in checked.used.items():
        if used.use.kind in ("reward", "generator"):
            yield f"plugins      {slot:<16}{used.component.id}  ({used.component.found.package})"
    for note in notes:
        yield f"notes        {note}"


def _set_in_words(one: EvalSetSettings) -> str:
    ks = ", ".join(f"pass@{k}" for k in one.pass_k)
    return (
        f"{one.name}: {one.n_samples} response{'' if one.n_samples == 1 else 's'} a prompt at temperature"
        f" {one.temperature:g}, at most {one.max_response_len} tokens; {ks} with reward {one.pass_threshold:g}"
    )


def _help() -> str:
    own = list(flag_table().own())
    chosen = [flag for name in _HELP_FLAGS for flag in own if flag.name == name]
    parts = [_USAGE, block("most used", [line for flag in chosen for line in _entry(flag)])]
    for section in _HELP_SECTIONS:
        flags = [flag for flag in own if flag.target == section and flag.alias_of is None]
        lines = [line for flag in flags if flag.name not in _HELP_WITHOUT for line in _entry(flag)]
        if section == "evaluation":
            lines += entry("  [[evaluation.sets]]", [SECTIONS[section].model_fields["sets"].description or ""], "")
        parts.append(block(f"[{section}]", lines))
    return "\n".join(parts)


def _entry(flag: Flag) -> Iterator[str]:
    words = " NAME FILE ..." if flag.pairs else metavar(flag.type)
    return entry(f"  {flag.spelled}{words}", [_HELP_TEXTS.get(flag.name, flag.help)], flag.default)
