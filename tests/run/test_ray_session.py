"""A Ray that cannot be started or joined is reported with what to do."""

from __future__ import annotations

from typing import Any

import pytest
import ray

from slime.config import RunConfig
from slime.config.options import ClusterOptions
from slime.errors import ClusterError
from slime.run.ray_session import ray_session


def broken_init(**_: Any) -> None:
    """Fail as Ray does on a machine that is too slow."""
    raise Exception("The current node timed out during startup.")


@pytest.mark.parametrize(
    ("address", "message"),
    [
        (None, r"Ray could not be started: The current node timed out during startup\. It may be too slow"),
        ("10.0.0.1:6379", r"the Ray cluster 10\.0\.0\.1:6379 could not be joined: .* Check --ray-address"),
    ],
)
def test_ray_errors_become_cluster_errors(monkeypatch: pytest.MonkeyPatch, address: str | None, message: str) -> None:
    monkeypatch.setattr(ray, "init", broken_init)
    config = RunConfig(cluster=ClusterOptions(device="cpu", ray_address=address))
    with pytest.raises(ClusterError, match=message), ray_session(config):
        pass
    assert not ray.is_initialized()
