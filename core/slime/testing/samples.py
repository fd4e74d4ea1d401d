"""Made-up samples, groups and estimator batches, in the tokens of a tokenizer of single characters.

Token ids: padding 0, end of sequence 1, the two marks of a chat message 2 and 3, unknown 4, newline 5, then printable
ASCII.
"""

from __future__ import annotations

import math
import random
import string
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from slime.plugin import EstimatorBatch, TokenBatch
from slime.types import Group, Sample, Status

if TYPE_CHECKING:
    from torch import Tensor

PAD, END, START, STOP, UNKNOWN = "<pad>", "<eos>", "<|im_start|>", "<|im_end|>", "<unk>"
CHARACTERS = (PAD, END, START, STOP, UNKNOWN, "\n", *string.printable[:95])
_IDS = {character: number for number, character in enumerate(CHARACTERS)}
#: the trainer keeps `TokenBatch.log_ratio` within this
_BOUND = 20.0
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


# --- tokens ------------------------------------------------------------------------------------------


def encode(text: str) -> list[int]:
    """Token ids of plain text, as `make_tokenizer().encode(text, add_special_tokens=False)` returns them."""
    return [_IDS.get(character, _IDS[UNKNOWN]) for character in text]


def decode(tokens: Sequence[int]) -> str:
    """The text of token ids, without special tokens."""
    return "".join(CHARACTERS[token] for token in tokens if _IDS[UNKNOWN] < token < len(CHARACTERS))


def make_tokenizer() -> Any:
    """A transformers tokenizer of single characters with a chat template, made without a download.

    Importing transformers takes seconds; `encode` and `decode` do the same for plain text.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(dict(_IDS), unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=[START, STOP],
        chat_template=_CHAT_TEMPLATE,
    )


# --- samples -----------------------------------------------------------------------------------------


def make_sample(prompt: str = "1+1=", response: str | None = "2", *, label: str | None = "2", **fields: Any) -> Sample:
    """A finished sample, with one token a character as `make_tokenizer` has them.

    Args:
        prompt: Its prompt.
        response: Its response; None: a pending sample, not answered yet.
        label: The expected answer.
        **fields: Other fields of `Sample`, which override what follows from the texts.
    """
    pending: dict[str, Any] = {"group_index": 0, "index": 0, "prompt": prompt, "tokens": encode(prompt), "label": label}
    if response is None:
        return Sample(**pending | fields)
    answer = encode(response)
    finished: dict[str, Any] = {
        "tokens": encode(prompt) + answer,
        "response": response,
        "response_length": len(answer),
        "loss_mask": [1] * len(answer),
        "rollout_log_probs": [-0.5] * len(answer),
        "weight_versions": ["1"],
        "finish_reason": "stop",
        "status": Status.COMPLETED,
        "rollout_id": fields.get("index", 0),
    }
    return Sample(**pending | finished | fields)


def make_group(rewards: Sequence[float | None] = (1.0, 0.0), *, index: int = 0, **fields: Any) -> Group:
    """Finished samples of one prompt with these rewards; `Sample.index` counts up from 1000 x `index`.

    `fields` go to `make_sample` for every sample.
    """
    samples = []
    for number, reward in enumerate(rewards, start=1000 * index):
        own = {"group_index": index, "index": number, "rollout_id": number, "reward": reward}
        samples.append(make_sample(**{**fields, **own}))
    return Group(index, samples)


# --- estimator batches -------------------------------------------------------------------------------


def make_batch(
    rewards: Sequence[Sequence[float]] = ((1.0, 0.0, 0.5), (2.0, 2.0)),
    *,
    masks: Sequence[Sequence[int]] | None = None,
    kl: Sequence[Sequence[float]] | None = None,
    values: Sequence[Sequence[float]] | None = None,
    rollout_ids: Sequence[int] | None = None,
    reward_parts: Mapping[str, Sequence[float]] | None = None,
    metadata: Sequence[dict[str, Any]] | None = None,
    columns: Mapping[str, Sequence[Sequence[float]]] | None = None,
) -> EstimatorBatch:
    """An estimator's input with known numbers.

    Args:
        rewards: Of each group, of each of its samples; N samples in all, group after group.
        masks: N x [T_i]; default: two trained tokens each.
        kl: N x [T_i], if the estimator needs it.
        values: N x [T_i], if the estimator needs them.
        rollout_ids: [N]; default: every sample is a rollout of its own.
        reward_parts: Name -> [N]; default: none.
        metadata: N dictionaries; default: empty ones.
        columns: Name -> N x [T_i]; default: none.
    """
    import torch

    def rows(column: Sequence[Sequence[float]]) -> list[Tensor]:
        return [torch.tensor(row, dtype=torch.float32) for row in column]

    flat = [reward for group in rewards for reward in group]
    return EstimatorBatch(
        rewards=torch.tensor(flat, dtype=torch.float32),
        group_ids=torch.tensor([index for index, group in enumerate(rewards) for _ in group], dtype=torch.int64),
        rollout_ids=torch.tensor(list(range(len(flat)) if rollout_ids is None else rollout_ids), dtype=torch.int64),
        loss_masks=rows(masks if masks is not None else [[1, 1]] * len(flat)),
        kl=None if kl is None else rows(kl),
        values=None if values is None else rows(values),
        reward_parts={name: torch.tensor(part, dtype=torch.float32) for name, part in (reward_parts or {}).items()},
        metadata=[{} for _ in flat] if metadata is None else list(metadata),
        columns={name: rows(column) for name, column in (columns or {}).items()},
    )


def make_token_batch(
    log_probs: Sequence[Sequence[float]] = ((-0.5, -1.0), (-2.0,)),
    *,
    old_log_probs: Sequence[Sequence[float]] | None = None,
    advantages: Sequence[Sequence[float]] | None = None,
    masks: Sequence[Sequence[int]] | None = None,
    ratio: Literal["token", "sequence"] = "token",
    eps_clip: float = 0.2,
    eps_clip_high: float = 0.28,
    eps_clip_c: float | None = None,
) -> TokenBatch:
    """The input of an estimator's `objective`, as the trainer makes it, with known numbers.

    `log_probs` of the batch is a leaf: after `loss.sum().backward()`, `log_probs.grad` has the gradient.

    Args:
        log_probs: Of each sequence, of each of its tokens: S x [T_i], M tokens in all.
        old_log_probs: S x [T_i]; default: the same, so that every ratio is 1.
        advantages: S x [T_i]; default: 1 for every token.
        masks: S x [T_i]; default: every token is trained on.
        ratio: That of the estimator's spec.
        eps_clip: `--eps-clip`.
        eps_clip_high: `--eps-clip-high`.
        eps_clip_c: `--eps-clip-c`.
    """
    import torch

    def flat(rows: Sequence[Sequence[float]]) -> Tensor:
        return torch.tensor([value for row in rows for value in row], dtype=torch.float32)

    lengths = [len(row) for row in log_probs]
    new = flat(log_probs).requires_grad_()
    ones = [[1] * length for length in lengths]
    return token_batch(
        new,
        flat(log_probs if old_log_probs is None else old_log_probs),
        flat(ones if advantages is None else advantages),
        flat(ones if masks is None else masks),
        lengths,
        ratio=ratio,
        eps_clip=eps_clip,
        eps_clip_high=eps_clip_high,
        eps_clip_c=eps_clip_c,
    )


def token_batch(
    new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, lengths: Sequence[int], *, ratio: str, **clip: Any
) -> TokenBatch:
    """A micro-batch of whole sequences: [M] each; `lengths` are the tokens of every sequence."""
    import torch

    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    old = torch.where(mask > 0, old, new.detach())
    log_ratio = (new - old) * mask
    if ratio == "sequence":
        zeros = torch.zeros(len(lengths))
        trained = zeros.index_add(0, ids, mask).clamp(min=1)
        log_ratio = (zeros.index_add(0, ids, log_ratio) / trained)[ids] * mask
    return TokenBatch(
        log_probs=new,
        old_log_probs=old,
        log_ratio=log_ratio.clamp(-_BOUND, _BOUND),
        advantages=advantages * mask,
        loss_mask=mask,
        sequence_ids=ids,
        num_sequences=len(lengths),
        **clip,
    )


def random_batch(
    sizes: Sequence[int],
    seed: int,
    *,
    equal_rewards: bool = False,
    siblings: bool = False,
    kl: bool = False,
    values: bool = False,
    columns: Sequence[str] = (),
) -> EstimatorBatch:
    """An estimator's input as irregular as in a run: groups of different sizes in mixed order, with holes in the masks.

    Args:
        sizes: Samples of each group. They are shuffled, and group and rollout ids are arbitrary.
        seed: Seed of all random choices.
        equal_rewards: Whether all samples of a group have the same reward.
        siblings: Whether some samples of a group come from one rollout and share its reward.
        kl: Whether the batch has KL.
        values: Whether the batch has values.
        columns: Names of the columns that it has, whose numbers are random, and NaN at a fifth of the tokens.
    """
    rng = random.Random(seed)
    rows: list[tuple[int, int, float]] = []
    for group, size in zip(rng.sample(range(10_000), len(sizes)), sizes, strict=True):
        level = rng.choice([0.0, 1.0, rng.uniform(-3, 3)])
        rollouts = [rng.randrange(10**9) for _ in range((size + 1) // 2 if siblings else size)]
        scores = [level if equal_rewards else rng.uniform(-2, 2) for _ in rollouts]
        rows += [(group, rollouts[i % len(rollouts)], scores[i % len(rollouts)]) for i in range(size)]
    rng.shuffle(rows)
    masks = [[int(rng.random() < 0.8) for _ in range(rng.randint(1, 12))] for _ in rows]
    if len(masks) > 2:
        masks[0] = [0] * 5  # in the statistics, but not in the loss

    def noise(scale: float) -> list[list[float]]:
        return [[rng.gauss(0, scale) for _ in mask] for mask in masks]

    def with_gaps() -> list[list[float]]:
        return [[math.nan if rng.random() < 0.2 else value for value in row] for row in noise(1.0)]

    groups, rollout_ids, rewards = zip(*rows, strict=True)
    batch = make_batch(
        [rewards],
        masks=masks,
        kl=noise(0.1) if kl else None,
        values=noise(1.0) if values else None,
        rollout_ids=rollout_ids,
        columns={name: with_gaps() for name in columns},
    )
    return replace(batch, group_ids=batch.group_ids.new_tensor(groups))


def random_buffer(seed: int) -> list[Group]:
    """0 to 8 finished groups of 1 to 5 samples, in no order, some samples failed or truncated."""
    rng = random.Random(seed)
    buffer = []
    for index in rng.sample(range(100), rng.randint(0, 8)):
        level = rng.choice([None, 0.0, 1.0])
        scores = [rng.choice([0.0, 1.0, -0.5]) if level is None else level for _ in range(rng.randint(1, 5))]
        group = make_group(scores, index=index, metadata={"row": index})
        for sample in group.samples:
            if rng.random() < 0.15:
                sample.status, sample.reward, sample.failure = Status.FAILED, None, "the reward raised ValueError"
            elif rng.random() < 0.15:
                sample.status, sample.finish_reason = Status.TRUNCATED, "length"
        buffer.append(group)
    return buffer
