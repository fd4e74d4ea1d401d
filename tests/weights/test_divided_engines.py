"""Engines whose ranks divide requests (DP attention) or experts: log-probs, and weights over every transport."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.engines import cpu_engine, running
from tests.support.families import read_architecture
from tests.support.model_folders import Folders
from tests.weights.test_live_mixtures import assert_serves, weights

from slime.config.weight_options import SyncOptions
from slime.engine.control import EngineControl
from slime.errors import WeightSyncError
from slime.weights.transports import create_transport
from slime.weights.verify import WeightCheck

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.mark.parametrize(
    ("family", "flags"),
    [
        ("qwen3_moe", ("--enable-dp-attention", "--dp-size", "2")),
        ("qwen3_moe", ("--attn-dp-size", "2", "--ep-size", "2")),
        ("deepseek_v3", ("--ep-size", "2")),
        ("deepseek_v3", ("--enable-dp-attention", "--dp-size", "2")),
    ],
    ids=["mixture", "divided-experts", "experts-alone", "latent-attention"],
)
def test_ranks_that_divide_requests_or_experts_get_the_weights_and_serve_them(
    family: str, flags: tuple[str, ...], model_folder: Folders, fork_server: Path, tmp_path: Path
) -> None:
    old, new = model_folder(family, seed=1), model_folder(family, seed=2)
    model = read_architecture(new)
    engine = cpu_engine(old, tmp_path, fork_server=fork_server, tp_size=2, extra_args=flags)
    options = SyncOptions(check_weight_update_equal=True, weight_sync_timeout_s=60.0)
    with running(engine):
        assert_serves(engine, old)
        ep_size, dp_size = 2 if "--ep-size" in flags else 1, 1 if len(flags) == 2 else 2
        control = EngineControl(engine.url, tp_size=2, ep_size=ep_size, dp_size=dp_size)
        assert control.capacity() == 256, "the requests of all ranks together"
        for transport, wanted in (("distributed", new), ("tensor", old), ("disk", new)):
            sender = create_transport(
                options.model_copy(update={"update_weight_transport": transport}),
                [control],
                model=model,
                hf_folder=new,
                scratch=tmp_path,
                on_gpu=False,
            )
            sender.send(iter(weights(wanted).items()), version=transport)  # compares every tensor of every rank
            sender.close()
            assert_serves(engine, wanted)
        other = WeightCheck(model, [2], ep_size=ep_size, dp_size=3 - dp_size)
        list(other.observe(iter(weights(new).items())))
        with pytest.raises(WeightSyncError, match=r"differ from the trainer's: .*self_attn\.o_proj"):
            other.compare(engine.url, control.weights_checksum())
