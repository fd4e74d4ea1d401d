"""SGLang's own profiles of the engines, for the steps of --profile-steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from slime.config import RunConfig
from slime.engine.control import EngineControl, EngineKeys
from slime.errors import SlimeError
from slime.observe.profiles import folder_of_profiles, profile_name

logger = logging.getLogger(__name__)


class EngineProfiles:
    """The profiles of all engines. One that fails is a warning: a run does not end for it."""

    def __init__(self, config: RunConfig, run_dir: Path, keys: EngineKeys) -> None:
        self._config, self._folder, self._keys = config, folder_of_profiles(run_dir), keys
        #: engines that are being profiled, by index
        self._running: dict[int, EngineControl] = {}

    def start(self, step: int, urls: Sequence[str]) -> None:
        """Begin to profile the engines, if there are any and `step` is to be profiled; the step ends with `stop`."""
        if not urls or step not in self._config.run.profiled_steps:
            return
        limit = self._config.cluster.step_timeout_s
        engines = {index: EngineControl(url, self._keys, timeout_s=limit) for index, url in enumerate(urls)}
        activities = ["CPU", *(["GPU"] if self._config.device == "cuda" else [])]

        def begin(index: int) -> None:
            engines[index].start_profile(self._folder, activities, prefix=profile_name(step), name=f"engine-{index}")

        begun = self._each(begin, engines)
        self._running = {index: engines[index] for index in begun}

    def stop(self) -> None:
        """Have the engines write their profiles, if they are profiled."""
        running, self._running = self._running, {}
        if running:
            self._each(lambda index: running[index].stop_profile(), running)

    def _each(self, work: Callable[[int], None], engines: dict[int, EngineControl]) -> list[int]:
        """Do the `work` for all engines at once; those for which it succeeded."""

        def one(index: int) -> bool:
            try:
                work(index)
            except SlimeError as error:
                logger.warning("engine %d is not profiled: %s", index, error)
                return False
            return True

        with ThreadPoolExecutor(max_workers=min(32, len(engines))) as threads:
            return [index for index, done in zip(engines, threads.map(one, engines), strict=True) if done]
