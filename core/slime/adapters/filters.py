"""Filter functions as buffer filters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slime.adapters.arguments import args_of
from slime.adapters.data_sources import dataset_of, made_source
from slime.errors import PluginContractError
from slime.plugin import Context, Group, NoOptions, Sample, Selection
from slime.plugins.local.loading import LocalFunction
from slime.plugins.local.parameters import Parameters


class GroupsBufferFilter:
    """A function `(args, rollout_id, buffer, num_samples)` over groups, each a list of samples.

    `num_samples` counts groups and `rollout_id` is None.  Groups that it does not return stay in the buffer.
    """

    def __init__(self, function: LocalFunction, options: NoOptions, context: Context) -> None:  # noqa: ARG002 - the factory contract
        self._function = function
        self._args = args_of(context)

    def select(self, buffer: Sequence[Group], want: int) -> Selection:
        """The groups that the function returned, in its order."""
        shown = [list(group.samples) for group in buffer]
        answer = self._function(args=self._args, rollout_id=None, buffer=list(shown), num_samples=want)
        return Selection(_places(_listed(answer), buffer))


class SamplesBufferFilter:
    """A function `(args, buffer, num_samples)` over samples, whatever group they are of.

    `num_samples` counts samples: enough for as many groups as are wanted.  A group is kept where one of its samples is,
    in the order in which they first appear; samples of further groups are left in the buffer.
    """

    def __init__(self, function: LocalFunction, options: NoOptions, context: Context) -> None:  # noqa: ARG002 - the factory contract
        self._function = function
        self._args = args_of(context)

    def select(self, buffer: Sequence[Group], want: int) -> Selection:
        """The groups of the samples that the function returned."""
        shown = [sample for group in buffer for sample in group.samples]
        largest = max((len(group.samples) for group in buffer), default=0)
        answer = self._function(args=self._args, buffer=list(shown), num_samples=want * largest)
        return Selection(_places(_listed(answer), buffer)[:want])


def method_filter(
    function: LocalFunction, options: NoOptions, context: Context
) -> GroupsBufferFilter | SamplesBufferFilter:
    """The method `buffer_filter` of a data source class, as if it were a function."""
    method = made_source(function, dataset_of(context), context).buffer_filter
    parameters = Parameters.of(method)
    shape = GroupsBufferFilter if "rollout_id" in parameters.names else SamplesBufferFilter
    return shape(LocalFunction(method, parameters, False, f"{function.title}.buffer_filter"), options, context)


class SamplingFilter:
    """A function `(args, samples)` that looks at one finished group and says whether to keep it."""

    def __init__(self, function: LocalFunction, options: NoOptions, context: Context) -> None:  # noqa: ARG002 - the factory contract
        self._function = function
        self._args = args_of(context)

    def select(self, buffer: Sequence[Group], want: int) -> Selection:
        """Groups in their order up to `want`; those that the function refuses are dropped with its reason."""
        selection = Selection([])
        for place, group in enumerate(buffer):
            if len(selection.keep) == want:
                break
            keep, reason = self._verdict(self._function(args=self._args, samples=list(group.samples)))
            if keep:
                selection.keep.append(place)
            else:
                selection.drop[place] = reason
        return selection

    def _verdict(self, answer: Any) -> tuple[bool, str]:
        keep = getattr(answer, "keep", answer)
        # numpy's and torch's booleans are no `bool`, and a forgotten return is no refusal.
        if type(keep).__name__ not in ("bool", "bool_", "Tensor"):
            raise PluginContractError(
                f"returned a {type(answer).__name__}, expected True, False or an object with keep and reason"
            )
        reason = getattr(answer, "reason", None)
        return bool(keep), str(reason) if reason else self._function.title.partition(":")[2]


def _listed(answer: object) -> list[Any]:
    if not isinstance(answer, list | tuple):
        raise PluginContractError(f"returned a {type(answer).__name__}, expected a list of what it keeps of the buffer")
    return list(answer)


def _places(kept: list[Any], buffer: Sequence[Group]) -> list[int]:
    """Where in the buffer the returned samples, or groups of samples, are; by identity."""
    place_of = {id(sample): place for place, group in enumerate(buffer) for sample in group.samples}
    places: dict[int, None] = {}
    for item in kept:
        samples = item if isinstance(item, list | tuple) else getattr(item, "samples", [item])
        for sample in samples:
            if not isinstance(sample, Sample) or id(sample) not in place_of:
                raise PluginContractError(
                    f"returned a {type(sample).__name__} that is not in the buffer, expected some of what it was shown"
                    " (the same objects, no copies)"
                )
            places[place_of[id(sample)]] = None
    return list(places)
