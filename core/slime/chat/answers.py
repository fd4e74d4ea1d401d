"""What the engine reported of the answers that one sample is made of."""

from __future__ import annotations

import base64
from array import array
from collections.abc import Mapping
from typing import Any

from slime.plugin import Generation
from slime.types import Sample, SpecInfo, Status

_STATUS = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}


class Answers:
    """Adds the reports of a sample's answers up: `add` each, then `fill` the sample.

    Keeps numbers only; the engine's `meta_info`, with its row per token, is not held on to.
    """

    __slots__ = ("_abort", "_cached", "_routed", "_spec", "finish_reason", "weight_versions")

    def __init__(self) -> None:
        #: the last answer's; None before the first
        self.finish_reason: str | None = None
        #: of all answers, in order, without repeats
        self.weight_versions: list[str] = []
        self._spec: SpecInfo | None = None
        self._cached: float | None = None
        self._abort: str | None = None
        self._routed: str | None = None

    @classmethod
    def of(cls, sample: Sample) -> Answers:
        """What a sample whose response was cut short has of earlier answers; of a new one nothing."""
        answers = cls()
        answers.weight_versions = list(sample.weight_versions)
        answers._spec = SpecInfo(**vars(sample.spec_info)) if sample.spec_info.spec_verify_ct else None
        answers._cached = sample.metrics.get("cached_tokens")
        return answers

    def add(self, answer: Generation) -> None:
        """One more answer, the latest."""
        meta = answer.meta
        self.finish_reason = answer.finish_reason
        for version in answer.weight_versions:
            if version not in self.weight_versions:
                self.weight_versions.append(version)
        if answer.finish_reason == "abort":
            self._abort = _abort_message(meta)
        if "spec_verify_ct" in meta:
            self._add_spec_info(meta)
        if (cached := meta.get("cached_tokens")) is not None:
            self._cached = (self._cached or 0.0) + cached
        # The latest covers the whole sequence, the prompt with all earlier answers included.
        self._routed = meta.get("routed_experts")

    def fork(self) -> Answers:
        """A copy that goes on by itself."""
        other = Answers()
        other.finish_reason, other.weight_versions = self.finish_reason, list(self.weight_versions)
        other._abort, other._cached, other._routed = self._abort, self._cached, self._routed
        other._spec = None if self._spec is None else SpecInfo(**vars(self._spec))
        return other

    def fill(self, sample: Sample) -> None:
        """Set what the answers say: status and failure by how the last one ended, versions, finish reason, counters.

        `rollout_routed_experts` is set where the engine reports them: [P + T - 1] rows, one for each token that was
        computed, of layers x experts per token.  The metric `cached_tokens` is the prompt tokens that the engines had
        in their prefix cache, over all answers.
        """
        sample.weight_versions = list(self.weight_versions)
        sample.finish_reason = self.finish_reason
        sample.spec_info = SpecInfo() if self._spec is None else self._spec
        if self._cached is not None:
            sample.metrics["cached_tokens"] = self._cached
        if self._routed is not None:
            sample.rollout_routed_experts = _rows(self._routed, len(sample.tokens) - 1)
        status = _STATUS.get(self.finish_reason or "")
        sample.status = Status.FAILED if status is None else status
        sample.failure = None
        if status is None:
            sample.failure = f"unknown finish reason {self.finish_reason!r}"
        elif status is Status.ABORTED:
            sample.failure = f"the engine aborted the request: {self._abort or 'no reason given'}"

    def _add_spec_info(self, meta: Mapping[str, Any]) -> None:
        spec = self._spec = self._spec or SpecInfo()
        spec.spec_accept_token_num += meta.get("spec_num_correct_drafts", 0)
        spec.spec_draft_token_num += meta.get("spec_num_proposed_drafts", 0)
        spec.spec_verify_ct += meta["spec_verify_ct"]
        spec.completion_token_num += meta.get("completion_tokens", 0)


def _abort_message(meta: Mapping[str, Any]) -> str | None:
    reason = meta.get("finish_reason")
    message = reason.get("message") if isinstance(reason, Mapping) else None
    return None if message is None else str(message)


def _rows(encoded: str, rows: int) -> list[list[int]] | None:
    """SGLang's base64 of int32 [rows, layers, top k] as a list per row; None where it does not divide into them."""
    flat = array("i", base64.b64decode(encoded))
    if rows <= 0 or len(flat) % rows:
        return None
    width = len(flat) // rows
    return [flat[start : start + width].tolist() for start in range(0, len(flat), width)]
