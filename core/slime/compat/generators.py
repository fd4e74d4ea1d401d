"""Generate functions as generators."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import asdict
from functools import cached_property
from typing import Any

from slime.compat.signatures import ByName, args_of
from slime.errors import PluginContractError, SlimeError
from slime.kit.chat import ChatTemplate, Codec
from slime.kit.readers.tokenize import tokenize_prompt
from slime.kit.sessions import ContextFull, Inline, Session, SessionLimits
from slime.plugin import Context, NoOptions, PolicyClient, Sample, SamplingParams, Status
from slime.registry.contracts import reward_problem
from slime.registry.function_path import LocalFunction

#: `finish_reason` -> status of a sample that the function left pending
_STATUS = {"length": Status.TRUNCATED, "abort": Status.ABORTED}


class LocalGenerator:
    """Calls a function with one sample, or with `[sample]`, and adds the tokens if it returns only text.

    The function may have parameters called `sample` or `samples`, `args`, `sampling_params` (a dictionary with the
    engine's names), `sampling` (the same as `slime.plugin.SamplingParams`), `evaluation`, `policy`
    (`slime.plugin.PolicyClient`) and `tokenizer`.

    A returned sample with tokens is passed on unchanged. One without tokens gets those that
    `slime.kit.sessions.generate_single` recorded, as one sample per conversation. If the function did not call
    `generate_single`, its text is tokenized: the tokens trained on may then differ from those that were sampled, and
    there are no log-probs of the engine. A run that needs log-probs refuses such a sample.
    """

    def __init__(self, local: LocalFunction, options: NoOptions, context: Context) -> None:  # noqa: ARG002 - the factory contract
        config = context.config
        self._function = ByName.load(local)
        self._args = args_of(context)
        self._tokenizer = context.tokenizer
        self._logger = context.logger
        self._template: bool = config.data.apply_chat_template
        self._variables: dict[str, Any] = config.data.apply_chat_template_kwargs
        self._limits = SessionLimits(config.rollout.rollout_max_context_len)
        supervised = not config.trains_policy
        self._own_rewards = not (supervised or config.reward.reward is not None or config.reward.terms)
        self._needs_log_probs = needs_log_probs(config)
        self._warned = False

    async def generate(self, sample: Sample, sampling: SamplingParams, policy: PolicyClient) -> list[Sample]:
        """The samples that the function returns, with tokens."""
        prompt, prompt_tokens = sample.prompt, list(sample.tokens)
        # Samples of a group share the prompt, and a function may append to the conversation.
        sample.prompt = deepcopy(prompt)
        async with Inline(lambda: self._session(str(sample.index), policy, sampling)) as inline:
            try:
                answer = await self._function(
                    args=self._args,
                    sampling_params=_by_name(sampling),
                    sampling=sampling,
                    evaluation=sampling.evaluation,
                    policy=policy,
                    tokenizer=self._tokenizer,
                    sample=sample,
                    samples=[sample],
                )
            except SlimeError as error:
                session = inline.session
                if session is None or session.error is not None:
                    raise
                if session.aborted is None:
                    if not isinstance(error, ContextFull) or session.counts.answered == 0:
                        raise
                    session.cut()
                answer = sample
        produced = [answer] if isinstance(answer, Sample) else answer
        if isinstance(produced, list) and all(isinstance(one, Sample) for one in produced):
            produced = _with_recorded(produced, inline.session, prompt, prompt_tokens)
            for one in produced:
                self._finish(one, prompt, prompt_tokens)
        # Anything else is reported by the kernel's check.
        return produced

    def _session(self, key: str, policy: PolicyClient, sampling: SamplingParams) -> Session:
        """A session for `generate_single`. Raises `ValueError` for a tokenizer without chat template."""
        return Session(key, policy, sampling, self._chat, self._tokenizer, limits=self._limits, parser=None)

    @cached_property
    def _chat(self) -> ChatTemplate:
        """Made when a function first calls `generate_single`: other runs need no chat template."""
        return ChatTemplate(self._tokenizer, **self._variables)

    @cached_property
    def _codec(self) -> Codec:
        return Codec(self._tokenizer)

    def _finish(self, sample: Sample, prompt: Any, prompt_tokens: list[int]) -> None:
        """Fill in what the function left out. Raises `PluginContractError` if that cannot be done."""
        if sample.status is Status.PENDING and (sample.response or sample.response_length):
            sample.status = _STATUS.get(sample.finish_reason or "", Status.COMPLETED)
        if not sample.trainable:
            return
        if sample.response_length == 0:
            self._tokenize(sample, prompt, prompt_tokens)
        if self._own_rewards:
            _check_own_reward(sample.reward)

    def _tokenize(self, sample: Sample, prompt: Any, prompt_tokens: list[int]) -> None:
        if not sample.response:
            raise PluginContractError("returned a sample without a response, neither as tokens nor as text")
        if self._needs_log_probs:
            raise PluginContractError(
                f"returned text without tokens, and {self._needs_log_probs} needs the engine's log-probs: add a"
                " parameter `policy`, and keep the tokens and log_probs that it returns"
            )
        if not self._warned:
            self._warned = True
            self._logger.warning(
                "%s returns text without tokens: it is tokenized, and its tokens may differ from those sampled",
                self._function.title,
            )
        before = prompt_tokens
        if sample.prompt != prompt:
            before = tokenize_prompt(
                self._tokenizer, sample.prompt, apply_chat_template=self._template, template_kwargs=self._variables
            )
        response = self._codec.encode_after(sample.response, before[-1] if before else None)
        sample.tokens = before + response
        sample.response_length = len(response)
        sample.rollout_log_probs = None


def _with_recorded(
    produced: list[Sample], session: Session | None, prompt: str | list[dict[str, Any]], prompt_tokens: list[int]
) -> list[Sample]:
    """The returned samples, with the one that has no tokens replaced by one for each recorded conversation.

    Tokens, log-probs, weight versions and status are the engine's; everything else stays as the function set it.

    Raises:
        PluginContractError: Several samples have no tokens. (What the policy raised is raised again.)
    """
    if session is None:
        return produced
    if session.error is not None:
        raise session.error
    without = [sample for sample in produced if sample.response_length == 0 and sample.status is not Status.FAILED]
    if not without:
        return produced
    if len(without) > 1:
        raise PluginContractError(
            f"returned {len(without)} samples without tokens, expected at most one, which slime replaces by one for"
            " each conversation. Return one, or set the tokens of each"
        )
    [asked] = without
    if session.aborted is not None:
        asked.status, asked.failure = Status.ABORTED, session.aborted
        return produced
    # Messages that the function appended to the prompt are part of the recorded conversation.
    text, mask = asked.response, asked.loss_mask
    asked.prompt, asked.tokens = prompt, prompt_tokens
    recorded = session.samples(asked)
    if not recorded:
        return produced
    if mask is not None:
        recorded[-1].loss_mask = _narrowed(mask, recorded[-1].loss_mask or [])
    if text:
        recorded[-1].response = text
    others = [sample for sample in produced if sample is not asked]
    return others + recorded


def _narrowed(mask: list[int], recorded: list[int]) -> list[int]:
    """The function's own mask, checked: it may select some of the tokens that the policy generated."""
    if len(mask) != len(recorded):
        raise PluginContractError(
            f"returned a loss_mask of {len(mask)} entries for a conversation of {len(recorded)} tokens after the"
            " prompt. Leave it None to train on all that the policy generated, or start from"
            " slime.kit.sessions.build_loss_mask(sample)"
        )
    foreign = sum(1 for own, written in zip(mask, recorded, strict=True) if own and not written)
    if foreign:
        raise PluginContractError(
            f"returned a loss_mask that is 1 on {foreign} tokens that the policy did not generate"
        )
    return mask


def _check_own_reward(reward: object) -> None:
    """Check the `Sample.reward` that a function sets when nothing else scores its samples.

    Raises `PluginContractError`.
    """
    if reward is None:
        raise PluginContractError(
            "returned a sample without a reward, and the run has no reward component: set Sample.reward, or choose"
            " --reward or --custom-rm-path"
        )
    value = reward.get("score") if isinstance(reward, dict) else reward
    if (problem := reward_problem(value)) is not None:
        got, expected = problem
        raise PluginContractError(
            f"returned a sample with reward {got}, {expected}, or a dictionary with such a number as 'score'"
        )


def _by_name(sampling: SamplingParams) -> dict[str, Any]:
    """The parameters in the engine's form; what is not set is left out."""
    values = asdict(sampling)
    del values["evaluation"], values["routed_from"]
    lists = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    return {name: value for name, value in lists.items() if value not in (None, [])}


def needs_log_probs(config: Any) -> str:
    """The flag because of which the run needs the engine's log-probs; empty if it does not."""
    algorithm = config.algorithm
    if algorithm.loss_type != "policy_loss":
        return ""
    flags = {
        "--true-on-policy-mode": algorithm.true_on_policy_mode,
        "--use-tis": algorithm.use_tis,
        "--off-policy-correction": algorithm.off_policy_correction is not None,
        "--off-policy-sequence-delta": algorithm.off_policy_sequence_delta is not None,
        "--use-rollout-logprobs (the default with --async, filters and over-sampling)": bool(
            algorithm.use_rollout_logprobs
        ),
    }
    return next((flag for flag, stated in flags.items() if stated), "")
