"""The Ray runtime of one run: started (or joined) and ended here and nowhere else."""

from __future__ import annotations

import logging
import os
import signal
from types import TracebackType

import ray

from slime.config import RunConfig
from slime.errors import ClusterError, ConfigError


class RaySession:
    """Context manager around `ray.init` / `ray.shutdown`.

    A local Ray is started quietly, without dashboard, and dies with this process (Ray asks the kernel
    to end its daemons with their parent).  With `--ray-address` the run joins that cluster instead, and
    leaves it running.
    """

    def __init__(self, config: RunConfig, *, trains: bool = True) -> None:
        """`trains`: whether there are training ranks beside the engines."""
        self._config = config
        self._ranks = config.world_size if trains else 0

    def __enter__(self) -> RaySession:
        on_sigterm = signal.getsignal(signal.SIGTERM)
        try:
            self._init()
        except Exception as error:
            ray.shutdown()
            where = self._config.cluster.ray_address
            what = "Ray could not be started" if where is None else f"the Ray cluster {where} could not be joined"
            raise ClusterError(
                f"{what}: {str(error).strip().rstrip('.') or type(error).__name__}. "
                + (
                    "On a machine that is busy with other things it may be too slow: try again when it is not."
                    if where is None
                    else "Is --ray-address right, and does `ray status` on that machine answer?"
                )
            ) from error
        # Ray puts handlers of its own in place that leave at once; the run's ends it in order.
        signal.signal(signal.SIGTERM, on_sigterm)
        self._check_devices()
        return self

    def _init(self) -> None:
        address = self._config.cluster.ray_address
        if address is None:
            # Without it Ray writes a token into the user's home folder; a local, loopback-only Ray needs none.
            os.environ.setdefault("RAY_AUTH_MODE", "disabled")
            ray.init(
                address="local",
                # On CPU every actor asks for zero CPUs, and Ray should start no idle workers ahead of need.
                num_cpus=None if self._config.on_gpu else 1,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                configure_logging=False,
            )
        else:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)

    def _check_devices(self) -> None:
        if not self._config.on_gpu:
            return
        have = int(ray.cluster_resources().get("GPU", 0))
        need = self._ranks + self._config.num_engines * self._config.cluster.rollout_num_gpus_per_engine
        if need > have:
            self.close()
            raise ConfigError(
                f"the run needs {need} GPUs ({self._ranks} training ranks + {self._config.num_engines} "
                f"engines x {self._config.cluster.rollout_num_gpus_per_engine}) and Ray sees {have}. Lower "
                f"--actor-num-gpus-per-node or --rollout-num-gpus, or pass --ray-address of a larger cluster."
            )

    def close(self) -> None:
        """Disconnect; a local Ray ends with all its processes."""
        if ray.is_initialized():
            ray.shutdown()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
