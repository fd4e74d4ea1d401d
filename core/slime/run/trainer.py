"""The training rank of a trainer process."""

from __future__ import annotations

import logging
import re
from collections.abc import Container
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import cast

from slime.config import RunConfig
from slime.errors import ConfigError
from slime.plugin import Context, Estimator, EstimatorSpec
from slime.registry.plugin_set import Fingerprint, PluginSet, load_same_plugins
from slime.run.checkpoint.files import Files, record_files
from slime.run.checkpoint.read import read_checkpoint
from slime.train.advantages import NamedEstimator
from slime.train.checkpoint_io import BackgroundWrite
from slime.train.parallel import MeetingPoint
from slime.train.rank import MegatronRank
from slime.weights.models import Models

#: the number of the rank that wrote the file; rank 0 writes all others
_OF_RANK = re.compile(r"__(\d+)_\d+\.distcp")


class TrainerProcess(MegatronRank):
    """A rank of a run, which also hashes what it saves: all ranks at once, while the files are still in memory."""

    #: the checkpoint and its trainer's part, and the writing of it if that goes on in the background
    _saving: tuple[Path, Path, BackgroundWrite[Files] | None] | None = None

    def __init__(
        self, config: RunConfig, run_dir: Path, fingerprint: Fingerprint, rank: int, meeting: MeetingPoint
    ) -> None:
        """Build model, optimizer, process groups and estimator of one rank (collective).

        Args:
            config: The run's configuration.
            run_dir: The run folder.
            fingerprint: Fingerprint of the driver's plugins; this process must have the same plugins.
            rank: Index among all ranks.
            meeting: Where the ranks find each other.
        """
        plugins = load_same_plugins(config.plugins, fingerprint)
        estimator, spec = build_estimator(config, run_dir, plugins)
        super().__init__(
            config,
            rank=rank,
            world_size=config.world_size,
            meeting=meeting,
            estimator=estimator,
            spec=spec,
            models=Models(plugins, config, run_dir),
            run_dir=run_dir,
        )

    def load(self, folder: Path, weights_only: bool = False) -> None:
        """Read the trainer's part of a checkpoint, and go on in the learning-rate schedules of its run.

        They go on at the saved step if this version of slime cannot read the options of that run.
        """
        super().load(folder, weights_only)
        if not weights_only:
            checkpoint = read_checkpoint(folder.parent)
            with suppress(ConfigError):
                self.continue_schedules(checkpoint.config, checkpoint.rollouts_done)

    def begin_save(self, checkpoint: Path, folder: Path, background: bool) -> None:
        """Save to `folder`, which lies in `checkpoint`; in the background, copy the state and begin to write it."""
        if not background:
            self.save(folder)
            self._saving = checkpoint, folder, None
            return
        write: BackgroundWrite[Files] = BackgroundWrite()
        self.save(folder, write)
        write.start(then=partial(self._record, checkpoint, folder, ()))
        self._saving = checkpoint, folder, write

    def save_model(self, checkpoint: Path, folder: Path) -> Files:
        """Write the weights alone to `folder`, which lies in `checkpoint`; the records of this rank's files."""
        self.policy.save_weights(folder)
        return self._record(checkpoint, folder, ())

    def written(self) -> bool:
        """Whether this rank has written its share, or could not; never blocks."""
        assert self._saving is not None
        write = self._saving[2]
        return write is None or write.written

    def finish_save(self) -> Files:
        """Wait until all is written; the records of the files that this rank wrote."""
        assert self._saving is not None
        (checkpoint, folder, write), self._saving = self._saving, None
        files = {} if write is None else write.finish()
        return {**files, **self._record(checkpoint, folder, files)}

    def _record(self, checkpoint: Path, folder: Path, known: Container[str]) -> Files:
        """The records of the files that this rank has written, other than the known ones."""
        mine = (path for path in folder.rglob("*") if path.is_file() and self._wrote(path))
        return record_files(checkpoint, [path for path in mine if str(path.relative_to(checkpoint)) not in known])

    def _wrote(self, path: Path) -> bool:
        match = _OF_RANK.fullmatch(path.name)
        return self._rank == (0 if match is None else int(match[1]))


def build_estimator(
    config: RunConfig, run_dir: Path, plugins: PluginSet
) -> tuple[Estimator | None, EstimatorSpec | None]:
    """The estimator and its spec; None for both in supervised fine-tuning."""
    name = config.algorithm.advantage_estimator
    if not config.trains_policy or name is None:
        return None, None
    context = Context(seed=config.run.seed, run_dir=run_dir, logger=logging.getLogger("slime.estimator"), config=config)
    component = plugins.find("estimator", name)
    estimator = plugins.build("estimator", name, config.component_options.get("estimator", {}), context)
    return NamedEstimator(estimator, component.title), cast(EstimatorSpec, component.spec)
