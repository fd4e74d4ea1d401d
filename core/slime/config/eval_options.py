"""Options of held-out evaluation, for all sets and for a single set."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from slime.config.section import ComponentChoice, PathText, Section, TokenId, TopK
from slime.config.value_types import underscored
from slime.errors import did_you_mean

_AtLeastOne = Annotated[int, Field(ge=1)]


class EvalSetOptions(Section):
    """One evaluation set: an `[[evaluation.sets]]` table. What it leaves out is as for all sets."""

    name: str
    path: PathText
    n_samples: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=1e6)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: TopK | None = None
    max_response_len: int | None = Field(default=None, ge=1)
    max_prompt_len: int | None = Field(default=None, ge=1)
    stop: list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    pass_threshold: float | None = None
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
        """Accept keys with dashes; name the set in the message about an unknown key."""
        if not isinstance(table, dict):
            return table
        stated = underscored(table)
        for key in stated:
            if key not in cls.model_fields:
                where = f"in the set {table.get('name', 'without a name')!r}"
                raise ValueError(f"unknown key {key!r} {where}.{did_you_mean(key, cls.model_fields)}")
        return stated


class EvalOptions(Section):
    """Held-out evaluation."""

    eval_prompt_data: list[tuple[str, PathText]] = Field(default=[])
    """Name and prompt file of each evaluation set; may be repeated."""
    sets: list[EvalSetOptions] = Field(default=[])
    """Evaluation sets with individual settings (run file only: tables with name, path, n_samples, temperature,
    reward, generator, ...; see docs/evaluation.md)."""
    eval_interval: int | None = Field(default=None, ge=1)
    """Evaluate before the first rollout, every N rollouts, and after the last."""
    n_samples_per_eval_prompt: int = Field(default=1, ge=1)
    """Responses per evaluation prompt."""
    eval_temperature: float = Field(default=0.0, ge=0, le=1e6)
    """Sampling temperature; 0: greedy decoding."""
    eval_top_p: float | None = Field(default=None, gt=0, le=1)
    """Nucleus sampling; default: --rollout-top-p."""
    eval_top_k: TopK | None = None
    """Sample from the k most likely tokens; -1: from all; default: --rollout-top-k."""
    eval_max_response_len: int | None = Field(default=None, ge=1)
    """Maximum tokens in a response; default: --rollout-max-response-len."""
    eval_max_prompt_len: int | None = Field(default=None, ge=1)
    """Maximum tokens in a prompt; default: --rollout-max-prompt-len."""
    eval_stop: list[str] | None = None
    """Strings that end a response; default: --rollout-stop."""
    eval_stop_token_ids: list[TokenId] | None = None
    """Token ids that end a response; default: --rollout-stop-token-ids."""
    eval_pass_threshold: float = 1.0
    """Reward from which a response counts as passed, for pass@k."""
    eval_pass_k: list[_AtLeastOne] | None = None
    """Values of k for pass@k; default: powers of two up to the number of responses per prompt."""
    skip_eval_before_train: bool = False
    """Do not evaluate before the first rollout."""
