"""Filter functions as buffer filters, and functions over a finished batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from slime.compat.data_sources import dataset_of, made_source
from slime.compat.signatures import ByName, args_of
from slime.errors import PluginContractError
from slime.plugin import Context, Group, NoOptions, Sample, Selection
from slime.registry.function_path import LocalFunction


class LocalBufferFilter:
    """A function that selects groups (lists of samples), or samples of any groups.

    If it has a parameter `rollout_id` (always None), it is called with groups, and `num_samples` is a number of groups.
    Otherwise it is called with samples, `num_samples` is the number of samples in as many groups as are wanted, and a
    group is kept if the function returns one of its samples. Whatever it does not return stays in the buffer.
    """

    def __init__(self, local: LocalFunction | ByName, options: NoOptions, context: Context) -> None:  # noqa: ARG002 - the factory contract
        self._function = local if isinstance(local, ByName) else ByName.load(local)
        self._args = args_of(context)

    def select(self, buffer: Sequence[Group], want: int) -> Selection:
        """Keep the groups that the function returned, or whose samples it returned, in its order."""
        over_groups = "rollout_id" in self._function.names
        shown: list[Any] = [list(group.samples) for group in buffer]
        count = want
        if not over_groups:
            count *= max(map(len, shown), default=0)
            shown = [sample for samples in shown for sample in samples]
        answer = self._function(args=self._args, rollout_id=None, buffer=shown, num_samples=count)
        if not isinstance(answer, list | tuple):
            raise PluginContractError(
                f"returned a {type(answer).__name__}, expected a list of what it keeps of the buffer"
            )
        kept = _indices(answer, buffer)
        return Selection(kept if over_groups else kept[:want])


def method_filter(local: LocalFunction, options: NoOptions, context: Context) -> LocalBufferFilter:
    """The method `buffer_filter` of a data source class, as if it were a function."""
    source = made_source(local, dataset_of(context), context)
    return LocalBufferFilter(ByName(source.buffer_filter, f"{local.title}.buffer_filter"), options, context)


class SamplingFilter:
    """A function `(args, samples)` that decides whether to keep a finished group."""

    def __init__(self, local: LocalFunction, options: NoOptions, context: Context) -> None:  # noqa: ARG002 - the factory contract
        self._function = ByName.load(local)
        self._args = args_of(context)

    def select(self, buffer: Sequence[Group], want: int) -> Selection:
        """Keep up to `want` groups in their order; groups that the function refuses are dropped with its reason."""
        selection = Selection([])
        for index, group in enumerate(buffer):
            if len(selection.keep) == want:
                break
            keep, reason = self._verdict(self._function(args=self._args, samples=list(group.samples)))
            if keep:
                selection.keep.append(index)
            else:
                selection.drop[index] = reason
        return selection

    def _verdict(self, answer: Any) -> tuple[bool, str]:
        keep = getattr(answer, "keep", answer)
        # Booleans of numpy and torch are not `bool`, and a forgotten return must not count as a refusal.
        if type(keep).__name__ not in ("bool", "bool_", "Tensor"):
            raise PluginContractError(
                f"returned a {type(answer).__name__}, expected True, False or an object with keep and reason"
            )
        reason = getattr(answer, "reason", None)
        return bool(keep), str(reason) if reason else self._function.title.partition(":")[2]


def batch_function(
    local: LocalFunction,
    options: NoOptions,  # noqa: ARG001 - the factory contract
    context: Context,
) -> Callable[[list[Any]], object]:
    """A function over a finished batch, to be called with its samples or its groups; the caller checks the result.

    The function of `--rollout-sample-filter-path` has the parameter `groups`: a list of samples per group. That of
    `--custom-reward-post-process-path` has the parameter `samples` and returns (raw rewards, rewards): raw rewards go
    to the metrics, rewards to the estimator.
    """
    function, args = ByName.load(local), args_of(context)
    return lambda batch: function(args=args, samples=batch, groups=batch)


def _indices(kept: Sequence[Any], buffer: Sequence[Group]) -> list[int]:
    """Indices into the buffer of the returned samples, or groups of samples, found by identity."""
    index_of = {id(sample): index for index, group in enumerate(buffer) for sample in group.samples}
    indices: dict[int, None] = {}
    for item in kept:
        samples = item if isinstance(item, list | tuple) else getattr(item, "samples", [item])
        for sample in samples:
            if not isinstance(sample, Sample) or id(sample) not in index_of:
                raise PluginContractError(
                    f"returned a {type(sample).__name__} that is not in the buffer, expected objects of the buffer,"
                    " not copies"
                )
            indices[index_of[id(sample)]] = None
    return list(indices)
