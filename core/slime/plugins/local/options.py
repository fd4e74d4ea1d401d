"""Options of rewards given by path."""

from __future__ import annotations

from pydantic import Field

from slime.plugin import Options


class ScoreOptions(Options):
    """Options of a reward function."""

    reward_key: str | None = Field(
        default=None,
        description="entry of the dictionary it returns that is the reward; default: --reward-key, else `score`",
    )


class ModelOptions(Options):
    """Options of a reward model class."""

    model_path: str | None = Field(default=None, description="model_path of its constructor")


class RequiredModelOptions(Options):
    """Options of a reward model class whose constructor insists on a path."""

    model_path: str = Field(description="model_path of its constructor")
