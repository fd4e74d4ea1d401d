"""Named per-token columns: one number for each response token of a sample, from a generator, a reward or the trainer.

What a generator or a reward names is on `Sample.columns`, goes through the training batch to the estimator
(`EstimatorBatch.columns`) unchanged, and is logged with slime's own columns (`slime.observe.token_columns`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from slime.errors import PluginContractError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

#: who wrote a token, as the numbers of the column `source`
SOURCES = {"policy": 0, "tool": 1, "template": 2}
#: the columns that slime fills in, and what they mean, in the order in which they are shown
BUILT_IN = {
    "loss_mask": "1 where the token is trained on, else 0",
    "source": "0 policy, 1 tool or other messages, 2 chat template, -1 not known",
    "weight_version": "version of the weights that sampled the token; -1: not sampled, or not known",
    "engine_logprob": "log-prob under the engine that sampled the token",
    "trainer_logprob": "log-prob under the trainer, from which the gap is computed",
    "ref_logprob": "log-prob under the reference",
    "gap": "trainer_logprob - engine_logprob",
    "entropy": "entropy of the policy, in nats",
    "ratio": "importance ratio that the objective got: of the token, or of its sequence",
    "clipped": "1 where a bound removed the token's gradient, else 0",
    "kl": "KL to the reference by --kl-loss-type",
    "correction": "off-policy weight by which the loss was multiplied",
    "advantage": "advantage, as the objective got it",
    "value": "the critic's value",
    "returns": "the critic's target",
}
#: built-in columns that a generator may fill in, because only it knows them
_OF_GENERATORS = frozenset(("source", "weight_version"))
#: further names that the files of columns use
_TAKEN = frozenset(("line", "group", "index", "step", "flag", "gap_max", "gap_token", "tokens", "pieces"))


def check_name(name: object) -> str:
    """A name for a column of a plugin's own. Raises `PluginContractError` if it is none, or is slime's."""
    if not isinstance(name, str) or not name.isidentifier():
        raise PluginContractError(f"names a column {name!r}, expected letters, digits and underscores")
    if name in BUILT_IN or name in _TAKEN:
        raise PluginContractError(f"names a column {name!r}, which is a name of slime's own; choose another")
    return name


def check_columns(
    columns: object, length: int, *, sample: object = None, generator: bool = False
) -> dict[str, NDArray[np.float32]]:
    """Columns of one sample as float32 arrays that share no memory with what was given.

    Args:
        columns: Name -> [T] numbers; NaN for tokens without a value.
        length: The sample's number of response tokens T.
        sample: `Sample.index`, for errors.
        generator: Whether a generator gives them, which may fill in some of slime's own.

    Raises:
        PluginContractError: A name is not an identifier or is slime's own, or a column does not fit.
    """
    import numpy as np

    if not isinstance(columns, Mapping):
        raise PluginContractError(f"returned columns of sample {sample} as {type(columns).__name__}, expected a dict")
    checked: dict[str, NDArray[np.float32]] = {}
    for name, values in columns.items():
        if not (generator and name in _OF_GENERATORS):
            check_name(name)
        where = f"returned column {name!r} of sample {sample}"
        try:
            with np.errstate(over="ignore"):
                column = np.array(np.asarray(values, dtype=np.float32))
        except (TypeError, ValueError) as error:
            raise PluginContractError(f"{where} that is not a list of numbers: {error}") from None
        if column.shape != (length,):
            got = f"{len(column)} numbers" if column.ndim == 1 else f"an array of shape {list(column.shape)}"
            raise PluginContractError(
                f"{where} as {got}, expected one for each of its {length} response tokens (NaN where there is none)"
            )
        if np.isinf(column).any():
            raise PluginContractError(
                f"{where} with an infinite value at token {int(np.isinf(column).argmax())}, expected finite numbers,"
                " or NaN where there is none"
            )
        if name == "source" and not np.isin(column[~np.isnan(column)], list(SOURCES.values())).all():
            known = ", ".join(f"{number} ({who})" for who, number in SOURCES.items())
            raise PluginContractError(f"{where} with other numbers than {known}")
        checked[name] = column
    return checked
