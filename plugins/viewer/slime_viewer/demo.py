"""The run of `slime view --demo`: a process that makes a small model and trains it, beside the page."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from slime.errors import ConfigError, SlimeError, writing
from slime.observe.metrics import read_metrics
from slime_viewer.demo_run import RUN
from slime_viewer.run_files import CONFIG

#: seconds that the run has to end in order, and then, after more signals, at once
_END_S, _END_AT_ONCE_S = 60.0, 10.0
#: seconds until a run folder must be there
_MADE_WITHIN_S = 600.0
#: bytes at the end of the log that are printed after a failure
_TOLD_BYTES = 2000


class Demo:
    """The run, and the folder with all that it makes."""

    def __init__(self, folder: Path | None) -> None:
        """Make the folder; nothing runs yet.

        Args:
            folder: A folder that is empty or not there; None: a new one in `outputs/`.

        Raises:
            ConfigError: The folder has files, or cannot be made.
        """
        place = folder or Path("outputs") / f"demo-{time.strftime('%Y-%m-%d_%H%M%S')}"
        self.folder = place.absolute()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if any(self.folder.iterdir()):
                raise ConfigError(f"--demo {place} is not empty; expected a folder that is empty or not there yet")
        except OSError as error:
            raise ConfigError(f"the folder of the demo, {place}, cannot be made: {error.strerror}") from None
        #: the run folder
        self.run, self.log = self.folder / RUN, self.folder / "train.log"
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start the process. It ends with this one, however that ends."""
        with writing(self.log), self.log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "slime_viewer.demo_run", str(self.folder)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Else Ctrl-C would reach it twice: from the terminal, and from `end`.
                start_new_session=True,
            )

    async def made(self) -> None:
        """Until there is a run folder.

        Raises:
            SlimeError: The process has failed.
        """
        assert self._process is not None
        deadline = time.monotonic() + _MADE_WITHIN_S
        while not (self.run / CONFIG).is_file():
            if self._process.returncode is not None:
                raise SlimeError(self._failure())
            if time.monotonic() > deadline:
                raise SlimeError(f"the demo did not begin within {_MADE_WITHIN_S:g} s; its output is in {self.log}")
            await asyncio.sleep(0.1)

    async def finished(self) -> str:
        """Wait until the run is finished. Returns what to tell the user about it.

        Raises:
            SlimeError: It has failed.
        """
        assert self._process is not None
        if await self._process.wait() != 0:
            raise SlimeError(self._failure())
        rewards = [row["rollout/reward_mean"] for row in read_metrics(self.run) if "rollout/reward_mean" in row]
        risen = f": reward {rewards[0]:.2f} -> {rewards[-1]:.2f}" if rewards else ""
        return f"the run is finished{risen}. The page stays until Ctrl-C; later: slime view {self.run}"

    async def end(self) -> None:
        """End the process and all that it has started, if they still run."""
        process = self._process
        if process is None:
            return
        for signals, seconds in ((1, _END_S), (2, _END_AT_ONCE_S)):
            for _ in range(signals):  # a run ends in order after the first one, and at once after the third
                with suppress(ProcessLookupError):
                    process.send_signal(signal.SIGTERM)
                await asyncio.sleep(0.05)
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), seconds)
                return
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()

    def _failure(self) -> str:
        assert self._process is not None
        with self.log.open("rb") as log:
            log.seek(max(0, log.seek(0, 2) - _TOLD_BYTES))
            told = log.read().decode(errors="replace").strip()
        return f"the run of the demo failed with exit code {self._process.returncode}; {self.log} ends with:\n{told}"
