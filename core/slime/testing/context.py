"""A made-up run: the context that a component under test is built with."""

from __future__ import annotations

import atexit
import json
import logging
import shutil
import tempfile
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.plugin import Context
from slime.testing.samples import make_tokenizer

if TYPE_CHECKING:
    from slime.config import RunConfig

#: `--n-samples-per-prompt` of the made-up run
SAMPLES_PER_PROMPT = 4


def make_context(*, run_dir: Path | None = None, seed: int = 42, config: Any = None, tokenizer: Any = None) -> Context:
    """The `Context` that a component is built with.

    Args:
        run_dir: The run folder; default: a new temporary one, removed when Python ends.
        seed: The run's seed.
        config: The configuration; default: a run with 4 samples per prompt whose prompt file has five additions,
            shuffled by `seed`.
        tokenizer: Default: `make_tokenizer()`, made when it is first used, because that takes seconds.
    """
    folder = _temporary_folder() if run_dir is None else run_dir
    return Context(
        seed=seed,
        run_dir=folder,
        logger=logging.getLogger("slime.registry.under_test"),
        config=_made_up_run(folder, seed) if config is None else config,
        tokenizer=_LaterTokenizer() if tokenizer is None else tokenizer,
    )


def _made_up_run(folder: Path, seed: int) -> RunConfig:
    from slime.config import RunConfig
    from slime.config.options import DataOptions, RewardOptions, RolloutOptions

    data = folder / "prompts.jsonl"
    # Five prompts, so that a dozen is more than two epochs.
    rows = [{"prompt": f"{n}+1=", "label": str(n + 1), "metadata": {"row": n}} for n in range(5)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return RunConfig(
        data=DataOptions(prompt_data=[str(data)], rollout_shuffle=True, rollout_seed=seed),
        reward=RewardOptions(reward="made-up"),  # so that a generate function may leave rewards to the run
        rollout=RolloutOptions(
            num_rollout=1,
            rollout_batch_size=2,
            n_samples_per_prompt=SAMPLES_PER_PROMPT,
            rollout_max_response_len=64,
            max_turns=4,
        ),
    )


def _temporary_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="slime-testing-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


class _LaterTokenizer:
    """`make_tokenizer()`, made when it is first used."""

    @cached_property
    def _made(self) -> Any:
        return make_tokenizer()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # such as the names that pickle looks up
        return getattr(self._made, name)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._made(*arguments, **options)

    def __len__(self) -> int:
        return len(self._made)
