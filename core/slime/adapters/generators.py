"""Generate functions as generators."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import asdict
from functools import cached_property
from numbers import Real
from typing import Any

from slime.adapters.arguments import args_of
from slime.adapters.recorded import with_recorded
from slime.chat import ChatTemplate
from slime.data.tokenize import tokenize_prompt
from slime.errors import PluginContractError
from slime.plugin import Context, NoOptions, PolicyClient, Sample, SamplingParams, Status
from slime.plugins.local.loading import LocalFunction
from slime.sessions import ContextFull, Inline, Session, SessionLimits, TextsOnly, answering

#: of a sample that comes back pending, by its `finish_reason`
_STATUS = {"length": Status.TRUNCATED, "abort": Status.ABORTED}


class _LocalGenerator:
    """What generate functions have in common: what they may ask for, and what is made of their answer.

    A function may ask by name for `args`, `sampling_params` (a dictionary with the engine's names), `sampling` (the
    same as `slime.plugin.SamplingParams`), `evaluation`, `policy` (`slime.plugin.PolicyClient`) and `tokenizer`.

    A sample that comes back with tokens is passed on as it is.  One that comes back without gets those that
    `slime.sessions.generate_single` has kept, in as many samples as there were conversations.  Where nothing was asked
    in that way, its text is tokenised: what is trained on is then the text's tokens under the run's tokenizer, which
    need not be those that were sampled, and there are no log-probs of the engine's.  Where the run needs those, such a
    sample is refused.
    """

    def __init__(self, function: LocalFunction, options: NoOptions, context: Context) -> None:  # noqa: ARG002 - the factory contract
        config = context.config
        self._function = function
        self._args = args_of(context)
        self._tokenizer = context.tokenizer
        self._logger = context.logger
        self._template: bool = config.data.apply_chat_template
        self._variables: dict[str, Any] = config.data.apply_chat_template_kwargs
        self._limits = SessionLimits(config.rollout.rollout_max_context_len)
        supervised = config.algorithm.loss_type == "sft_loss"
        self._own_rewards = not (supervised or config.reward.reward is not None or config.reward.terms)
        self._needs_log_probs = _needs_log_probs(config)
        self._told = False

    async def _call(
        self, asked: Sample, sampling: SamplingParams, policy: PolicyClient, samples: dict[str, Any]
    ) -> list[Sample]:
        prompt, prompt_tokens = asked.prompt, list(asked.tokens)
        # Siblings share the prompt, and functions like to append to a conversation.
        asked.prompt = deepcopy(prompt)
        inline = Inline(lambda: self._session(str(asked.index), policy, sampling))
        try:
            with answering(inline):
                answer = await self._function(
                    args=self._args,
                    sampling_params=_by_name(sampling),
                    sampling=sampling,
                    evaluation=sampling.evaluation,
                    policy=policy,
                    tokenizer=self._tokenizer,
                    **samples,
                )
        except ContextFull:
            if inline.session is None or inline.session.counts.answered == 0:
                raise
            inline.session.cut()
            answer = asked
        finally:
            await inline.close()
        produced = [answer] if isinstance(answer, Sample) else answer
        if isinstance(produced, list) and all(isinstance(one, Sample) for one in produced):
            produced = with_recorded(produced, inline.session, prompt, prompt_tokens)
            for one in produced:
                self._finish(one, prompt, prompt_tokens)
        # Whatever else it is, the kernel's own check names it.
        return produced

    def _session(self, key: str, policy: PolicyClient, sampling: SamplingParams) -> Session:
        """Raises `ValueError` for a tokenizer without chat template."""
        return Session(
            key, policy, sampling, self._chat, self._tokenizer, limits=self._limits, parser=lambda _: TextsOnly()
        )

    @cached_property
    def _chat(self) -> ChatTemplate:
        """Made once, and only where a function asks in this way: other runs need no chat template."""
        return ChatTemplate(self._tokenizer, **self._variables)

    def _finish(self, sample: Sample, prompt: Any, prompt_tokens: list[int]) -> None:
        """Give a sample what the function left out.  Raises `PluginContractError` where that is too much."""
        if sample.status is Status.PENDING and sample.response:
            sample.status = _STATUS.get(sample.finish_reason or "", Status.COMPLETED)
        if not sample.trainable:
            return
        if sample.response_length == 0:
            self._tokenise(sample, prompt, prompt_tokens)
        if self._own_rewards:
            _check_own_reward(sample.reward)

    def _tokenise(self, sample: Sample, prompt: Any, prompt_tokens: list[int]) -> None:
        if not sample.response:
            raise PluginContractError("returned a sample without a response, neither as tokens nor as text")
        if self._needs_log_probs:
            raise PluginContractError(
                f"returned a text without tokens, and {self._needs_log_probs} needs the engine's log-probs of the very"
                " tokens: ask for `policy` and keep its tokens and log_probs"
            )
        if not self._told:
            self._told = True
            self._logger.warning(
                "%s returns texts without tokens: they are tokenised, which need not give the tokens that were sampled",
                self._function.title,
            )
        before = prompt_tokens
        if sample.prompt != prompt:
            before = tokenize_prompt(
                self._tokenizer, sample.prompt, apply_chat_template=self._template, template_kwargs=self._variables
            )
        response: list[int] = self._tokenizer.encode(sample.response, add_special_tokens=False)
        sample.tokens = before + response
        sample.response_length = len(response)
        sample.rollout_log_probs = None


class BatchGenerator(_LocalGenerator):
    """A function `(args, samples, evaluation)`, called with one sample at a time."""

    async def generate(self, sample: Sample, sampling: SamplingParams, policy: PolicyClient) -> list[Sample]:
        """What the function returns for `[sample]`."""
        return await self._call(sample, sampling, policy, {"samples": [sample]})


class SampleGenerator(_LocalGenerator):
    """A function `(args, sample, sampling_params, evaluation)` that returns a sample or several."""

    async def generate(self, sample: Sample, sampling: SamplingParams, policy: PolicyClient) -> list[Sample]:
        """What the function returns for `sample`."""
        return await self._call(sample, sampling, policy, {"sample": sample})


def _check_own_reward(reward: object) -> None:
    """What a function may set as `Sample.reward` where nothing else scores its samples.

    Raises `PluginContractError`.
    """
    if reward is None:
        raise PluginContractError(
            "returned a sample without a reward, and the run has no other: set Sample.reward, or state --reward or"
            " --custom-rm-path"
        )
    value = reward.get("score") if isinstance(reward, dict) else reward
    if not isinstance(value, Real) or not math.isfinite(value):
        raise PluginContractError(
            f"returned a sample with reward {reward!r}, expected a finite number, or a dictionary with one as 'score'"
        )


def _by_name(sampling: SamplingParams) -> dict[str, Any]:
    """The parameters as the engine takes them, without those that are not stated."""
    values = asdict(sampling)
    del values["evaluation"]
    lists = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    return {name: value for name, value in lists.items() if value not in (None, [])}


def _needs_log_probs(config: Any) -> str:
    """The flag of the run that needs the engine's log-probs; empty where none does."""
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
