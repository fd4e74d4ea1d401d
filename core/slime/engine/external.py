"""Engines that somebody else started: they are looked at, sent weights and asked, and never started or ended."""

from __future__ import annotations

import time
from pathlib import Path
from threading import Event, Thread

from slime.config import RunConfig
from slime.engine.control import EngineControl, EngineKeys
from slime.errors import ConfigError, DeadlineError, EngineError, EngineRefusedError, EngineStartError, SlimeError

#: seconds between two questions, and for an answer to one
_ASK_S = 2.0
_ANSWER_S = 10.0
#: so many refused connections, one after another, are no coincidence
_REFUSALS = 3


def external_keys(config: RunConfig) -> EngineKeys | None:
    """The keys in the file of --rollout-external-engine-keys; None without a file. Raises `ConfigError`."""
    if (path := config.cluster.rollout_external_engine_keys) is None:
        return None
    flag = f"--rollout-external-engine-keys {path}"
    try:
        words = Path(path).read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag} cannot be read: {error}") from None
    if len(words) not in (1, 2):
        raise ConfigError(
            f"{flag}: got {len(words)} words, expected the engines' --api-key in the first line and, if they have one,"
            " their --admin-api-key in the second"
        )
    return EngineKeys(words[0], words[-1])


def external_engine_args(config: RunConfig, keys: EngineKeys) -> list[tuple[str, EngineKeys, float]]:
    """What `ExternalEngine` takes, for each engine of --rollout-external-engine-addrs."""
    cluster = config.cluster
    return [(f"http://{address}", keys, cluster.hang_timeout_s) for address in cluster.rollout_external_engine_addrs]


class ExternalEngine:
    """Watches over one engine. Stands where the run's own engines have their supervisor.

    Its process and its machine are out of reach. What is seen is whether it answers, and under which version.
    """

    def __init__(self, url: str, keys: EngineKeys, silent_s: float) -> None:
        """Ask it for the first time.

        Args:
            url: Its address.
            keys: Its keys; it ignores them if it has none.
            silent_s: Seconds without an answer after which it counts as lost.

        Raises:
            EngineStartError: It does not answer.
        """
        self._url, self._silent_s = url, silent_s
        self._control = EngineControl(url, keys, timeout_s=_ANSWER_S)
        try:
            self._version = self._control.weight_version()
        except SlimeError as error:
            raise EngineStartError(
                f"the external engine at {url} does not answer: {error}. Every attempt of a run, a restart too, begins"
                " with all engines that it names. Start it again, or resume the run without it in"
                " --rollout-external-engine-addrs"
            ) from error
        self._failure: str | None = None
        self._closed = Event()
        Thread(target=self._look, name="slime-external-engine", daemon=True).start()

    def _look(self) -> None:
        answered, refusals = time.monotonic(), 0
        while not self._closed.wait(_ASK_S):
            try:
                version = self._control.weight_version()
            except EngineRefusedError as error:
                self._failure = f"the external engine at {self._url} refuses the run: {error}"
            except (EngineError, DeadlineError) as error:
                refusals = 0 if isinstance(error, DeadlineError) else refusals + 1
                if refusals >= _REFUSALS or time.monotonic() - answered > self._silent_s:
                    self._failure = f"the external engine at {self._url} is gone: {error}"
            else:
                answered, refusals = time.monotonic(), 0
                if self._version.isdecimal() and not version.isdecimal():
                    self._failure = (
                        f"the external engine at {self._url} was started again by somebody: its weights are of version"
                        f" {version!r}, and it had the run's {self._version}"
                    )
                self._version = version
            if self._failure is not None:
                return

    def address(self) -> str:
        """URL of the server."""
        return self._url

    def failure(self) -> str | None:
        """How it was lost; None as long as it answers."""
        return self._failure

    def close(self) -> None:
        """Look at it no longer. The engine runs on."""
        self._closed.set()
