"""Options of held-out evaluation: for all sets, and for one."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from slime.config.section import Section
from slime.errors import did_you_mean

_AtLeastOne = Annotated[int, Field(ge=1)]


class ComponentChoice(Section):
    """A component with its options: `"math"`, or `{name = "math", timeout-s = 5}`."""

    name: str
    options: dict[str, Any] = Field(default={})

    @model_validator(mode="before")
    @classmethod
    def _rest_is_options(cls, stated: Any) -> Any:
        """A bare name, or a table in which what is not `name` is an option of the component."""
        if isinstance(stated, str):
            return {"name": stated}
        if not isinstance(stated, dict):
            return stated
        rest = {key.replace("-", "_"): value for key, value in stated.items() if key not in cls.model_fields}
        own = {key: value for key, value in stated.items() if key in cls.model_fields}
        return own | {"options": {**own.get("options", {}), **rest}}


class EvalSetOptions(Section):
    """One evaluation set: an `[[evaluation.sets]]` table.  What it leaves out is as for every set."""

    name: str
    path: str
    n_samples: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = None
    max_response_len: int | None = Field(default=None, ge=1)
    max_prompt_len: int | None = Field(default=None, ge=1)
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    pass_threshold: float | None = Field(default=None, allow_inf_nan=False)
    pass_k: list[_AtLeastOne] | None = None
    reward: ComponentChoice | None = None
    generator: ComponentChoice | None = None
    input_key: str | None = None
    #: "none": rows have no label
    label_key: str | None = None
    metadata_key: str | None = None
    apply_chat_template: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, table: Any) -> Any:
        """Keys with dashes or underscores; those that are unknown, and booleans for numbers, with the set's name."""
        if not isinstance(table, dict):
            return table
        where = f"in the set {table.get('name', 'without a name')!r}"
        stated = {key.replace("-", "_"): value for key, value in table.items()}
        for key, value in stated.items():
            if key not in cls.model_fields:
                raise ValueError(f"unknown key {key!r} {where}.{did_you_mean(key, cls.model_fields)}")
            if isinstance(value, bool) and key != "apply_chat_template":
                raise ValueError(f"{key} {where} is {str(value).lower()}, expected a number, text, list or table")
        return stated

    @field_validator("top_k", mode="after")
    @classmethod
    def _all_or_some(cls, value: int | None) -> int | None:
        return all_or_some(value)


class EvalOptions(Section):
    """Held-out evaluation."""

    eval_prompt_data: list[tuple[str, str]] = Field(
        default=[], description="name and file of an evaluation set; may repeat"
    )
    sets: list[EvalSetOptions] = Field(
        default=[],
        description="evaluation sets with settings of their own (run file only: [[evaluation.sets]], with name, path,"
        " n_samples, temperature, reward, generator, ...: see docs/evaluation.md)",
    )
    eval_interval: int | None = Field(
        default=None, ge=1, description="evaluate every N rollouts, before the first and after the last"
    )
    n_samples_per_eval_prompt: int = Field(default=1, ge=1, description="responses per evaluation prompt")
    eval_temperature: float = Field(default=0.0, ge=0, allow_inf_nan=False, description="0: greedy")
    eval_top_p: float | None = Field(default=None, gt=0, le=1, description="default: --rollout-top-p")
    eval_top_k: int | None = Field(default=None, description="at least 1, or -1: all; default: --rollout-top-k")
    eval_max_response_len: int | None = Field(default=None, ge=1, description="default: --rollout-max-response-len")
    eval_max_prompt_len: int | None = Field(default=None, ge=1, description="default: --rollout-max-prompt-len")
    eval_stop: list[str] | None = Field(default=None, description="stop strings; default: --rollout-stop")
    eval_stop_token_ids: list[int] | None = Field(
        default=None, description="stop token ids; default: --rollout-stop-token-ids"
    )
    eval_pass_threshold: float = Field(
        default=1.0, allow_inf_nan=False, description="a response passes when its reward is at least this (pass@k)"
    )
    eval_pass_k: list[_AtLeastOne] | None = Field(
        default=None, description="the k of pass@k; default: the powers of two up to the responses per prompt"
    )
    skip_eval_before_train: bool = Field(default=False, description="do not evaluate before the first rollout")

    @field_validator("eval_top_k", mode="after")
    @classmethod
    def _all_or_some(cls, value: int | None) -> int | None:
        return all_or_some(value)


def all_or_some(value: int | None) -> int | None:
    """A `top_k`.  Engines refuse 0 and what is below -1, request by request; here it is refused once."""
    if value is not None and value != -1 and value < 1:
        raise ValueError(f"got {value}, expected at least 1, or -1 for all tokens")
    return value
