"""Options of the weights: models and checkpoints, adapters, and updates of the engines."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from slime.config.section import Count, Needs, PathText, Seconds, Section

#: seconds for each of the two steps in which a failed update is cleaned up
CLEANUP_S = 10.0
#: seconds after the deadline in which a sender says to the first what failed: it first ends its group, for which
#: engines get two moments of 2 s
LAST_WORDS_S = 10.0
#: seconds after the deadline in which the trainer says what failed: one sender, then both steps, on a busy machine
SYNC_ANSWER_S = LAST_WORDS_S + 2 * CLEANUP_S + 10.0

_IfDeleted = Needs("save_keep_last", because="all checkpoints are kept")
_IfAdapters = Needs("lora_rank", "lora_load")


class CheckpointOptions(Section):
    """Models and checkpoints."""

    hf_checkpoint: PathText | None = None
    """Hugging Face model folder: architecture, weights and tokenizer (required)."""
    model_family: str | None = None
    """Model family component; default: the one for `model_type` in config.json of --hf-checkpoint."""
    trust_remote_code: bool = False
    """Let Python files in the folder of --hf-checkpoint run, as a tokenizer that is code needs; also in the engines."""
    check_weights: Literal["sample", "all"] = "sample"
    """Look for NaN and infinity in a sample of every tensor of the model folders, or in all their numbers, before the
    start."""
    initial_megatron_checkpoint: PathText | None = None
    """Start from the weights of this checkpoint, slime's or Megatron-LM's (torch_dist), with a new optimizer."""
    ref_load: PathText | None = None
    """Hugging Face folder of the reference model; default: the initial weights."""
    save: PathText | None = None
    """Folder for checkpoints."""
    save_interval: int | None = Field(default=None, ge=1)
    """Save a checkpoint every N rollouts, and after the last."""
    async_save: Annotated[bool, Needs("save_interval", because="after the last checkpoint no training follows")] = False
    """Write checkpoints while training continues, from a copy in host memory; the run ends once the last is written."""
    save_keep_last: Annotated[Count | None, Needs("save", "save_interval")] = None
    """Delete older checkpoints once a new one is complete, and keep this many; default: keep all."""
    save_keep_every: Annotated[Count | None, _IfDeleted] = None
    """With --save-keep-last, also keep each checkpoint after a multiple of this many rollouts."""
    save_keep_best: Annotated[str | None, _IfDeleted] = None
    """With --save-keep-last, also keep the checkpoint with the highest value of this metric of metrics.jsonl, as
    eval/NAME; with NAME:min, the lowest."""
    preemption_timeout_s: Annotated[
        Seconds, Needs("save", "save_interval", because="SIGTERM then ends the run at once")
    ] = 300.0
    """After SIGTERM, seconds to finish the step, save a checkpoint and end; then the run ends without them."""
    load: PathText | None = None
    """Resume from the newest checkpoint in this folder."""
    skip_damaged_checkpoints: Annotated[bool, Needs("load")] = False
    """If the checkpoint of --load is damaged, resume from the newest intact one before it."""
    save_hf: PathText | None = None
    """Export the final weights to this folder in Hugging Face format. With {rollout} in its name, which is filled in,
    also the weights at every --save-interval."""

    @property
    def best_metric(self) -> tuple[str, bool] | None:
        """The metric of --save-keep-best, and whether lower is better."""
        if self.save_keep_best is None:
            return None
        name, _, direction = self.save_keep_best.rpartition(":")
        return (name, direction == "min") if direction in ("min", "max") else (self.save_keep_best, False)

    @property
    def exports_each(self) -> bool:
        """Whether --save-hf names another folder for every rollout."""
        return self.save_hf is not None and self.save_hf.format(rollout=0) != self.save_hf.format(rollout=1)


class LoraOptions(Section):
    """Low-rank adapters (LoRA), trained instead of the whole model."""

    lora_rank: Count | None = None
    """Train adapters of this rank and freeze the model; default: train all weights."""
    lora_alpha: Annotated[float | None, _IfAdapters] = Field(default=None, gt=0, le=1e6)
    """The adapters' update of a weight is multiplied by this / --lora-rank; default: the rank."""
    lora_targets: Annotated[list[str], _IfAdapters] = Field(default=["all-linear"])
    """Modules with adapters, by their Hugging Face names or the ends of them (q_proj), or all-linear."""
    lora_load: PathText | None = None
    """Start from the adapters in this PEFT folder, which states rank, alpha and modules."""
    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Only 0: with dropout, log-probs of the same tokens would differ from pass to pass."""

    @property
    def asked(self) -> bool:
        """Whether the run trains adapters."""
        return self.lora_rank is not None or self.lora_load is not None


class SyncOptions(Section):
    """Weight updates from the trainer to the engines."""

    update_weight_transport: Literal["distributed", "tensor", "disk"] | None = None
    """How weights are sent: by broadcast (distributed), through memory of one machine (tensor: without GPUs, or on GPUs
    with --colocate), or through a shared folder (disk). Default: tensor on one machine without GPUs unless --colocate
    is set, and on GPUs if it is; else distributed."""
    disk_delta: bool = False
    """With --update-weight-transport disk, write only what changed since the version before; each engine applies it to
    a copy of the weights in its node's temporary folder (TMPDIR)."""
    disk_delta_full_every: Annotated[Count, Needs("disk_delta")] = 20
    """Every so many versions is written whole. An engine that starts late reads the newest of them and what changed
    since."""
    update_weight_buffer_size: int = Field(default=512 * 2**20, ge=1)
    """Maximum number of bytes to send at a time; a sender holds at most twice as many besides its own weights."""
    check_weight_update_equal: bool = False
    """Verify after every update that the engines hold exactly the trainer's weights."""
    sync_draft_weights: Annotated[
        bool | None, Needs("enable_mtp_training", because="engines keep the layers of the folder, which do not change")
    ] = None
    """Send the trained layers for multi-token prediction too, with which engines speculate; default: where they do so
    with the model's own (--sglang-speculative-algorithm NEXTN or EAGLE, and no draft model)."""
    rollout_quantization: Literal["fp8"] | None = None
    """Engines hold the weights in this format, and are sent them quantised: fp8 for numbers of 8 bits (e4m3) with a
    scale for each 128 x 128 of them."""
    rollout_quantization_gap_interval: Annotated[Count, Needs("rollout_quantization")] = 10
    """Every so many rollouts, also compute the batch with what the engines' weights stand for: how far they are from
    that is train/dequantized_gap_mean."""
    inflight_kv: Annotated[
        Literal["recompute", "keep"],
        Needs("async_mode", called="--async", because="no request is in flight during an update"),
    ] = "recompute"
    """KV cache of requests in flight at a weight update (with --async): recompute it with the new weights, or keep it;
    keep turns the engines' prefix cache off."""
    weight_sync_timeout_s: Seconds = 600.0
    """Time limit for one update, in seconds."""
