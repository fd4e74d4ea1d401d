"""Fused layers of the trainer, for `--layer-backend fused`: compiled by torch, and attention of FlashAttention."""
