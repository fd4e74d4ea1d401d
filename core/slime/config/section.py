"""What an option's declaration consists of: the base of the sections, types with ranges, and conditions.

Every number that a user can state has a range. Without one, `--lr nan` or a seed of 20 digits passes all checks and
fails, or trains on nothing, long after the start.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from slime.config.value_types import accepts_booleans, check_path, describe, underscored, unusable

#: engines pass their seeds to numpy, which takes 32 bits; the first 31 leave room for one seed per engine
Seed = Annotated[int, Field(ge=0, le=2**31 - 1)]
#: time limits end within a year: longer waits overflow the operating system's clocks
Seconds = Annotated[float, Field(gt=0, le=366 * 24 * 3600)]
#: nodes, devices, processes
Count = Annotated[int, Field(ge=1, le=2**16)]
Port = Annotated[int, Field(ge=1, le=2**16 - 1)]
#: an index, of a training rank
Rank = Annotated[int, Field(ge=0, lt=2**16)]
#: an upper bound comes from the model's vocabulary
TokenId = Annotated[int, Field(ge=0)]
#: a path, or anything that contains one
PathText = Annotated[str, AfterValidator(check_path)]


def _check_top_k(value: int) -> int:
    """Refuse a value that the engines would refuse in every request."""
    if value != -1 and value < 1:
        raise ValueError(f"got {value}, expected at least 1, or -1 for all tokens")
    return value


TopK = Annotated[int, AfterValidator(_check_top_k)]


def _check_steps(value: str) -> str:
    """Refuse what is neither a step nor a range of steps."""
    first, _, last = value.partition("-")
    if not re.fullmatch(r"\d{1,9}(-\d{1,9})?", value) or int(last or first) < int(first):
        raise ValueError(f"got {value!r}, expected a step such as 3, or a range such as 3-5")
    return value


#: a step, or a range of them with its last
StepRange = Annotated[str, AfterValidator(_check_steps)]


class Needs:
    """Condition of an option: it has no effect unless one of the `conditions` is met.

    A condition is an option that must be stated, or a property of `RunConfig` that must be true.

    Args:
        conditions: Names of options or properties.
        called: What the user must add, if that is not just these options.
        because: Why the option has no effect otherwise.
    """

    def __init__(self, *conditions: str, called: str = "", because: str = "") -> None:
        self.conditions = conditions
        self._called, self._because = called, because

    def __str__(self) -> str:
        called = self._called or " or ".join(f"--{name.replace('_', '-')}" for name in self.conditions)
        return f"{called}: {self._because}" if self._because else called


@dataclass(frozen=True)
class Excludes:
    """Condition of an option: it cannot be stated together with the option `other`."""

    other: str
    because: str


class Section(BaseModel):
    """Base of the sections: frozen, unknown keys refused."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        populate_by_name=True,
        loc_by_alias=False,
        protected_namespaces=(),
        allow_inf_nan=False,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse true and false for numbers: pydantic would read them as 1 and 0."""
        if isinstance(value, bool):
            annotation = cls.model_fields[str(info.field_name)].annotation
            if not accepts_booleans(annotation):
                raise ValueError(f"got {str(value).lower()}, expected {describe(annotation)}")
        return value

    @field_validator("*", mode="after")
    @classmethod
    def _at_most_64_bits(cls, value: Any) -> Any:
        """Refuse whole numbers that neither a run file nor torch can hold; ranges that are narrower come first."""
        if (wrong := unusable(value)) is not None:
            raise ValueError(wrong.removeprefix(": "))
        return value


class ComponentChoice(Section):
    """A component with its options: `"math"`, or `{name = "math", timeout-s = 5}`."""

    name: str
    options: dict[str, Any] = Field(default={})

    @model_validator(mode="before")
    @classmethod
    def _other_keys_are_options(cls, stated: Any) -> Any:
        """Accept a bare name, and collect unknown keys of a table as options of the component."""
        if isinstance(stated, str):
            return {"name": stated}
        if not isinstance(stated, dict):
            return stated
        own = {key: value for key, value in stated.items() if key in cls.model_fields}
        rest = underscored({key: value for key, value in stated.items() if key not in cls.model_fields})
        nested = own.get("options", {})
        return own | {"options": {**nested, **rest}} if isinstance(nested, dict) else own

    def __str__(self) -> str:
        return self.name
