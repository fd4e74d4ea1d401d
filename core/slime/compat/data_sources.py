"""Data source classes given by path as data sources."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

from slime.compat.signatures import ByName, args_of
from slime.errors import CheckpointError, PluginContractError
from slime.kit.context_length import longest_training_prompt
from slime.kit.readers.data_source import RolloutDataSource, RolloutDataSourceWithBuffer
from slime.kit.readers.feed.feed import FeedOptions, PromptDataset
from slime.kit.readers.rows import PromptRow
from slime.kit.readers.tokenize import PromptFormat, prompt_ids
from slime.plugin import Context, Group, NoOptions, Sample
from slime.registry.function_path import LocalFunction

_FORMAT = 1


class LocalDataSource:
    """Makes groups of the prompts that a class provides.

    The class's `get_samples(n)` returns n prompts: one sample per prompt, or one list of samples per prompt. Samples
    outside lists that have the same `group_index` belong to one prompt. slime numbers groups and samples, repeats
    prompts to make --n-samples-per-prompt of each, and tokenizes prompts without tokens. A sample that has a response
    already is generated again.
    """

    def __init__(self, local: LocalFunction, options: NoOptions, context: Context) -> None:  # noqa: ARG002 - the factory contract
        data, rollout = context.config.data, context.config.rollout
        self._title = local.title
        self._dataset = dataset_of(context)
        self._source = made_source(local, self._dataset, context)
        self._copies: int = rollout.n_samples_per_prompt
        self._longest = longest_training_prompt(context.config)
        self._form = PromptFormat.of(data).showing(context.prompt_tools)
        self._tokenizer = context.tokenizer
        self._logger = context.logger
        self._next_group, self._next_index = 0, 0
        self._in_lists = False

    def take(self, n: int) -> list[Group]:
        """The class's next `n` prompts; `get_samples` is called until there are enough.

        Raises:
            PluginContractError: It returned nothing, or something other than samples.
        """
        groups: list[Group] = []
        while len(groups) < n:
            missing = n - len(groups)
            given = self._source.get_samples(missing)
            families = list(self._families(given))
            if not families:
                raise PluginContractError(f"returned nothing from get_samples({missing})")
            groups += [self._group(family) for family in families]
        return groups

    def generated(self, groups: Sequence[Group]) -> None:
        """Pass what was generated for a batch to the class's own `add_samples`, if it has one.

        It receives samples, or one list of samples per prompt if `get_samples` returned lists.
        """
        own = getattr(type(self._source), "add_samples", None)
        if own in (None, RolloutDataSource.add_samples, RolloutDataSourceWithBuffer.add_samples):
            return
        if self._in_lists:
            self._source.add_samples([list(group.samples) for group in groups])
        else:
            self._source.add_samples([sample for group in groups for sample in group.samples])

    def metrics(self) -> dict[str, float]:
        """`data/...`: the position in the dataset, and how many rows were left out."""
        return {} if self._dataset is None else self._dataset.metrics()

    def close(self) -> None:
        """Stop reading ahead, and close the files."""
        if self._dataset is not None:
            self._dataset.close()

    def state_dict(self) -> dict[str, Any]:
        """Indices, the position in the dataset, and the class's own `state_dict`."""
        own = getattr(self._source, "state_dict", None)
        return {
            "format": _FORMAT,
            "next_group": self._next_group,
            "next_index": self._next_index,
            "dataset": None if self._dataset is None else self._dataset.state_dict(),
            "own": own() if callable(own) else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`. A class without `load_state_dict` continues from the position in the dataset alone."""
        if state.get("format") != _FORMAT:
            raise CheckpointError(f"the data source's state has format {state.get('format')!r}, expected {_FORMAT}")
        self._next_group, self._next_index = state["next_group"], state["next_index"]
        if self._dataset is not None and state["dataset"] is not None:
            self._dataset.load_state_dict(state["dataset"])
        load = getattr(self._source, "load_state_dict", None)
        if callable(load) and state["own"] is not None:
            load(state["own"])
        else:
            self._logger.warning(
                "%s saves no state: it continues from its position in --prompt-data alone",
                self._title,
            )

    # --- prompts to groups ---------------------------------------------------------------------------

    def _families(self, given: object) -> Iterable[list[Sample]]:
        """The samples of each prompt, in the order in which prompts first appear."""
        if not isinstance(given, list | tuple):
            raise PluginContractError(f"returned a {type(given).__name__} from get_samples, expected a list of Samples")
        families: dict[object, list[Sample]] = {}
        for position, item in enumerate(given):
            self._in_lists = isinstance(item, list | tuple)
            samples = list(item) if isinstance(item, list | tuple) else [item]
            if not samples or not all(isinstance(sample, Sample) for sample in samples):
                kind = "an empty list" if item == [] else f"a {type(item).__name__}"
                raise PluginContractError(
                    f"returned {kind} in the list of get_samples, expected Samples or one list of Samples per prompt."
                    " dataset.sample returns prompts; write: return [Sample(prompt=prompt) for prompt in"
                    " self.dataset.sample(num_samples)]"
                )
            alone = self._in_lists or samples[0].group_index is None
            families.setdefault(("new", position) if alone else samples[0].group_index, []).extend(samples)
        return families.values()

    def _group(self, family: list[Sample]) -> Group:
        number = self._next_group
        self._next_group += 1
        distinct = _rollouts(family)
        templates = distinct + [distinct[-1]] * (self._copies - len(distinct))
        samples = []
        for template in templates:
            sample = Sample(
                group_index=number,
                index=self._next_index,
                prompt=deepcopy(template.prompt),
                tokens=template.tokens[: template.prompt_length],
                label=template.label,
                metadata=deepcopy(template.metadata),
                multimodal_inputs=template.multimodal_inputs,
            )
            self._next_index += 1
            samples.append(self._complete(sample, template))
        return Group(number, samples)

    def _complete(self, sample: Sample, template: Sample) -> Sample:
        """Fill in the label and metadata of the prompt's row, if the sample has none, and the prompt's tokens."""
        row = self._dataset.row_of(template.prompt) if self._dataset is not None else None
        if row is not None and sample.label is None and not sample.metadata:
            sample.label, sample.metadata = row.label, deepcopy(row.metadata)
        # The class may have changed a list of messages since it was read; a string cannot change.
        if not sample.tokens and row is not None and row.tokens is not None and isinstance(row.prompt, str):
            sample.tokens = list(row.tokens)
        if not sample.tokens:
            where = row.where if row is not None else f"get_samples of {self._title}"
            row = PromptRow(sample.prompt, sample.label, where=where)
            sample.tokens = prompt_ids(row, self._tokenizer, self._form, self._longest)
        return sample


def dataset_of(context: Context) -> PromptDataset | None:
    """The prompts of --prompt-data; None if the run has none."""
    data = context.config.data
    if not data.prompt_data:
        return None
    options = FeedOptions.of(context.config, context.prompt_tools)
    return PromptDataset(data.prompt_data, options=options, tokenizer=context.tokenizer)


def made_source(local: LocalFunction, dataset: PromptDataset | None, context: Context) -> Any:
    """An object of the class, with the attributes `dataset` and `args` even if its constructor does not take them."""
    given = {"dataset": dataset, "args": args_of(context)}
    source = ByName.load(local)(**given)
    for name, value in given.items():
        if not hasattr(source, name):
            setattr(source, name, value)
    return source


def _rollouts(family: list[Sample]) -> list[Sample]:
    """One sample for each rollout of a prompt: the prompt is generated again once for each of them."""
    seen: dict[object, Sample] = {}
    for position, sample in enumerate(family):
        seen.setdefault(("new", position) if sample.index is None else sample.index, sample)
    return list(seen.values())
