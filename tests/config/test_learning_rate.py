"""The default learning rate."""

from __future__ import annotations

from slime.config import load_config


def test_the_default_is_part_of_the_saved_configuration() -> None:
    words = "--hf-checkpoint m --prompt-data d --num-rollout 1 --rollout-batch-size 4 --loss-type sft_loss".split()  # noqa: SIM905
    config = load_config(words)
    assert config.megatron["lr"] == 1e-6
    assert "lr = 1e-06" in config.to_toml()
    assert load_config([*words, "--lr", "0.5"]).megatron["lr"] == 0.5
