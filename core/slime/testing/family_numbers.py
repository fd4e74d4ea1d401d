"""Whether a model family computes what transformers does: on real trainer ranks, in every parallel layout.

Tens of seconds for a small model, because each layout starts new ranks.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.plugin.architecture import Architecture, Rule
from slime.registry.plugin_set import survey_plugins
from slime.testing.random_models import transformers_model, write_random_model
from slime.testing.ranks import RankLauncher, run_ranks

if TYPE_CHECKING:
    from torch import Tensor

    from slime.rollout.train_batch import TrainBatch

ONE_RANK = "one rank"
#: largest differences that rounding in float32 explains
LOG_PROBS, WEIGHTS = 1e-4, 1e-5
_LOSS = 1e-5
_LR, _EPS = 1e-3, 1e-3
_FLAGS = {
    "TP": "--tensor-model-parallel-size",
    "PP": "--pipeline-model-parallel-size",
    "CP": "--context-parallel-size",
    "EP": "--expert-model-parallel-size",
    "ETP": "--expert-tensor-parallel-size",
}


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far a family's numbers in one layout differ from transformers'.

    Attributes:
        layout: The layout, such as "TP=2".
        log_probs: Largest difference of the log-prob of a response token.
        weights: Largest difference of a weight after one optimizer step.
        moved: Largest change of a weight in that step.
        problems: What is more than rounding, for an error message.
    """

    layout: str
    log_probs: float = math.nan
    weights: float = math.nan
    moved: float = math.nan
    problems: tuple[str, ...] = ()


def assert_family_matches_transformers(
    name: str,
    model: Mapping[str, Any] | Path | None = None,
    *,
    model_class: str | type | None = None,
    layouts: Sequence[str] | None = None,
    timeout_s: float = 180.0,
) -> list[Agreement]:
    """Train a small model of an installed family for one step, and raise `AssertionError` unless transformers agrees.

        def test_it_computes_what_transformers_does():
            assert_family_matches_transformers("pebble", model_class=PebbleForCausalLM)

    In every layout, in float32: the log-probs of random token sequences differ by less than 1e-4; loading and exporting
    gives the same bits; after one step of supervised training all weights differ from transformers' and
    torch's AdamW by less than 1e-5.

    Args:
        name: The family, as `--model-family` would name it. Its package must be installed.
        model: Content of a `config.json` that is filled with random weights, or a model folder; default: the `example`
            of its `FamilySpec`. Keys that are missing have the defaults of transformers.
        model_class: The class of transformers that computes the model, or its name; default: the one in
            `architectures`, or `causal_lm` of the `FamilySpec`.
        layouts: Such as "one rank", "TP=2", "PP=2", "CP=2", "EP=2" or "TP=2 ETP=1 EP=2"; default: one rank, and of
            TP=2, PP=2 and EP=2 those that divide the model.
        timeout_s: Seconds that a layout may take.

    Returns:
        What was measured, for each layout.

    Raises:
        ValueError: There is no model to try, or transformers cannot compute it.
    """
    spec = survey_plugins().find("family", name).spec
    model = spec.example if model is None else model
    if not model:
        raise ValueError(f"the FamilySpec of {name} has no example; pass model, the content of a small config.json")
    if model_class is None and not isinstance(model, Path) and not model.get("architectures"):
        model_class = spec.causal_lm
    with tempfile.TemporaryDirectory(prefix="slime-family-") as made:
        folder = model if isinstance(model, Path) else write_random_model(Path(made), model, model_class=model_class)
        architecture, config = _described(folder, name)
        batch = _batch(architecture.gpt["vocab_size"], config.get("pad_token_id"))
        expected = _by_transformers(folder, model_class, batch, architecture.carried)
        found = []
        for layout in layouts or layouts_of(architecture):
            flags, ranks = _flags_of(layout, architecture.transformer["num_layers"])
            results = run_ranks(_one_step, ranks, _run_flags(folder, name, ranks) + flags, batch, timeout_s=timeout_s)
            found.append(compare(expected, layout, results[0]))
    problems = [f"{one.layout}: {problem}" for one in found for problem in one.problems]
    if problems:
        raise AssertionError(f"model family {name} and transformers differ:\n" + "\n".join(f"- {p}" for p in problems))
    return found


def layouts_of(architecture: Architecture) -> tuple[str, ...]:
    """One rank, and of TP=2, PP=2 and EP=2 those that divide a model."""
    experts = architecture.transformer.get("num_moe_experts") or 0
    applies = {
        ONE_RANK: True,
        "TP=2": all(map(_halves, architecture.rules)),
        "PP=2": architecture.transformer["num_layers"] > 1,
        "EP=2": experts > 0 and experts % 2 == 0,
    }
    return tuple(layout for layout, possible in applies.items() if possible)


def _halves(rule: Rule) -> bool:
    """Whether two ranks can share a tensor; padding makes the vocabulary even."""
    dim = rule.parallel_dim
    if dim is None or rule.layout == "vocab":
        return True
    if rule.layout == "qkv":
        return rule.groups % 2 == 0
    return all(shape[dim] // rule.parts % 2 == 0 for shape in rule.shapes)


def _flags_of(layout: str, layers: int) -> tuple[list[str], int]:
    """Flags of a layout, and the number of ranks it takes."""
    sizes: dict[str, int] = {}
    for part in [] if layout == ONE_RANK else layout.split():
        matched = re.fullmatch(r"(\w+)=([1-9]\d*)", part)
        if matched is None or matched[1] not in _FLAGS:
            raise ValueError(f"layout {layout!r}: {part!r} is none of {', '.join(f'{key}=N' for key in _FLAGS)}")
        sizes[matched[1]] = int(matched[2])
    flags = [word for key, size in sizes.items() for word in (_FLAGS[key], str(size))]
    tensor, stages = sizes.get("TP", 1), sizes.get("PP", 1)
    if stages > 1 and layers % stages:
        flags += ["--num-layers-in-first-pipeline-stage", str(layers - layers // stages * (stages - 1))]
    dense, mixture = tensor * sizes.get("CP", 1), sizes.get("ETP", tensor) * sizes.get("EP", 1)
    return flags, stages * math.lcm(dense, mixture)


def _run_flags(folder: Path, name: str, ranks: int) -> list[str]:
    flags = {
        "--hf-checkpoint": folder, "--model-family": name, "--device": "cpu", "--threads-per-rank": 1,
        "--actor-num-gpus-per-node": ranks, "--loss-type": "sft_loss", "--max-tokens-per-gpu": 64,
        "--rollout-batch-size": 1, "--lr": _LR, "--adam-eps": _EPS, "--weight-decay": 0.0, "--clip-grad": 0.0,
    }  # fmt: skip
    return ["--calculate-per-token-loss", *(str(word) for flag in flags.items() for word in flag)]


def _described(folder: Path, name: str) -> tuple[Architecture, dict[str, Any]]:
    """The model in a folder, and its `config.json`."""
    from slime.config import read_config
    from slime.weights.hf_config import read_hf_config
    from slime.weights.models import Models

    config = read_hf_config(folder)
    return Models.installed(read_config(_run_flags(folder, name, 1))).describe(config), config


def _batch(vocabulary: int, padding: int | None, samples: int = 6) -> TrainBatch:
    """Token sequences of irregular lengths; some response tokens carry no loss, and one sequence none at all.

    Two of them begin with the same prompt, which the trainer may compute once. They do not have the token of padding,
    whose embedding transformers does not train.
    """
    import numpy as np

    from slime.rollout.train_batch import Ragged, TrainBatch

    rng = np.random.default_rng(0)
    lengths, prompts = rng.integers(1, 25, samples), rng.integers(2, 10, samples)
    lengths[:2], prompts[:2] = (9, 14), 16
    masks = [(rng.random(n) < 0.8).astype(np.float32) for n in lengths]
    masks[-1][:] = 0
    tokens = [rng.integers(0, vocabulary, p + t).astype(np.int32) for p, t in zip(prompts, lengths, strict=True)]
    tokens[1][: prompts[1]] = tokens[0][: prompts[0]]
    for sequence in tokens if padding is not None else ():
        sequence[sequence == padding] = 1 if padding == 0 else 0
    numbers = np.arange(samples, dtype=np.int64)
    return TrainBatch(
        rollout=0,
        tokens=Ragged.of(tokens, np.int32),
        loss_masks=Ragged.of(masks, np.float32),
        rewards=np.zeros(samples, dtype=np.float32),
        group_ids=numbers,
        rollout_ids=numbers,
        step_ids=np.zeros(samples, dtype=np.int64),
        sample_ids=numbers,
        rollout_log_probs=None,
    )


@dataclass(frozen=True)
class Step:
    """Log-probs before a step, its loss, and the tensors of the model before and after it."""

    log_probs: Sequence[Any]
    loss: float
    before: dict[str, Tensor]
    after: dict[str, Tensor]


def _one_step(launcher: RankLauncher, flags: list[str], batch: TrainBatch) -> Step:
    """By slime, on one of its ranks."""
    from slime.config import read_config

    rank = launcher.start(read_config(flags))
    log_probs = rank.log_probs(batch)
    before = {name: tensor.clone() for name, tensor in rank.named_hf_weights()}
    metrics = rank.train(batch)
    after = {name: tensor.clone() for name, tensor in rank.named_hf_weights()}
    rank.close()
    return Step(log_probs, metrics["loss"], before, after)


def _by_transformers(folder: Path, model_class: str | type | None, batch: TrainBatch, carried: tuple[str, ...]) -> Step:
    """By transformers and torch's AdamW."""
    import torch

    model = transformers_model(folder, model_class)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR, eps=_EPS, weight_decay=0.0)
    log_probs, masks = [], [torch.from_numpy(mask) for mask in batch.loss_masks]
    for tokens, response in zip(batch.tokens, batch.response_lengths, strict=True):
        ids = torch.from_numpy(tokens).long()
        scores = model(ids[None]).logits[0, :-1].log_softmax(-1)
        log_probs.append(scores.gather(-1, ids[1:, None]).squeeze(-1)[-int(response) :])
    total = torch.stack([(part * mask).sum() for part, mask in zip(log_probs, masks, strict=True)]).sum()
    loss = -total / torch.stack([mask.sum() for mask in masks]).sum()
    torch.autograd.backward(loss)
    optimizer.step()
    # Saving gives the tensors the names of the files, which those in memory may not have.
    with tempfile.TemporaryDirectory(prefix="slime-family-") as stepped:
        model.save_pretrained(stepped)
        after = _tensors(Path(stepped), carried)
    values = [part.detach().numpy() for part in log_probs]
    return Step(values, loss.item(), _tensors(folder, carried), after)


def _tensors(folder: Path, carried: tuple[str, ...]) -> dict[str, Tensor]:
    """The tensors in a folder that a run trains or exports from the model."""
    from safetensors.torch import load_file

    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= {name: tensor for name, tensor in load_file(path).items() if not name.startswith(carried)}
    if not found:
        raise ValueError(f"{folder} has no *.safetensors")
    return found


def compare(expected: Step, layout: str, got: Step) -> Agreement:
    """How far the numbers that were got are from those expected."""
    import numpy as np

    log_probs = max(float(np.abs(a - b).max()) for a, b in zip(got.log_probs, expected.log_probs, strict=True))
    problems = []
    if not log_probs < LOG_PROBS:
        problems.append(f"log-probs differ by {log_probs:.3g}; expected less than {LOG_PROBS:g}")
    if not abs(got.loss - expected.loss) < _LOSS * abs(expected.loss):
        problems.append(f"the loss is {got.loss}; expected {expected.loss}")
    if names := sorted(expected.before.keys() ^ got.before.keys()):
        where = ["the files" if name in expected.before else "the export" for name in names[:3]]
        only = "; ".join(f"{name} is only in {one}" for name, one in zip(names, where, strict=False))
        return Agreement(layout, log_probs, problems=(*problems, f"{len(names)} tensors do not match: {only}"))
    changed = [name for name, tensor in expected.before.items() if not _same(tensor, got.before[name])]
    if changed:
        problems.append(f"loading and exporting changed {len(changed)} tensors: {', '.join(changed[:3])}")
    difference = {name: _largest(got.after[name], expected.after[name]) for name in got.after}
    moved = max(_largest(expected.before[name], expected.after[name]) for name in got.after)
    worst = sorted(((value, name) for name, value in difference.items()), reverse=True)
    if not worst[0][0] < WEIGHTS:
        listed = ", ".join(f"{name} by {value:.3g}" for value, name in worst[:3])
        problems.append(f"after one step, weights differ by more than {WEIGHTS:g}: {listed}")
    if not moved > 10 * WEIGHTS:
        problems.append(f"the step of transformers changed no weight by more than {moved:.3g}: this shows nothing")
    return Agreement(layout, log_probs, worst[0][0], moved, tuple(problems))


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bool((a == b).all())


def _largest(a: Tensor, b: Tensor) -> float:
    """Largest difference; NaN counts as infinite."""
    if a.shape != b.shape:
        return math.inf
    value = float((a.float() - b.float()).abs().max())
    return math.inf if math.isnan(value) else value
