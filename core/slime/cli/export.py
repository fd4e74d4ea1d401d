"""`slime export`: write a run's checkpoint as a Hugging Face model folder."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from slime.cli.eval import read_request
from slime.cli.preflight import preflight
from slime.cli.train import make_run_folder, run_folder
from slime.errors import ConfigError

_USAGE = """\
usage: slime export CHECKPOINT DIR [--flag value]...

Write the weights of a checkpoint as a complete Hugging Face model folder.

  CHECKPOINT   a folder of --save (its newest checkpoint), or one of its
               checkpoints
  DIR          the model folder to write; must be new or empty
  --help       this text

Training ranks in the layout of the checkpoint's run read and write the weights.
Flags are those of `slime train` and override the run's: --hf-checkpoint MODEL
if the original model has moved (its configuration and tokenizer are copied),
--device and the parallel layout for another machine. Logs go to
OUTPUT_DIR/RUN_NAME (default: export_ with date and time). Exit code: 0 written,
1 failed, 2 bad input.
"""


def run(argv: Sequence[str]) -> int:
    """The command; returns its exit code.

    Raises:
        ConfigError: Bad input, before any process starts.
        SlimeError: The export failed.
    """
    if "--help" in argv or "-h" in argv:
        print(_USAGE, end="")
        return 0
    if len(argv) < 2 or any(word.startswith("-") for word in argv[:2]):
        raise ConfigError(
            f"slime export: got {' '.join(argv) or 'nothing'}, expected CHECKPOINT DIR and then flags (see slime export"
            " --help)"
        )
    source, *flags = argv[0], *argv[2:]
    folder = Path(argv[1]).resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not an empty folder. Choose another DIR.")
    request = read_request([source, *flags], time.strftime("export_%Y-%m-%d_%H%M%S"), exports=True)
    if request.checkpoint is None:
        raise ConfigError(f"{source} is not a checkpoint: expected a folder of --save, or one checkpoint in it")
    config = request.exporting
    checked = preflight(config, run_folder(config), request.functions, problems_of=lambda _: [])
    make_run_folder(checked.run_dir, checked.config)

    # It imports Ray, which nothing above this line needs.
    from slime import loop

    return loop.export(checked.config, checked.run_dir, checked.plugins, folder)
