"""Hugging Face and Megatron weights, and their transport to the engines.

`models.Models` turns a `config.json` into what Megatron builds. `hf_load.load_hf` fills Megatron shards from
safetensors, `shards.named_hf_tensors` gathers them back under their Hugging Face names, and `hf_save.save_hf` writes
them to a model folder. `transports.WeightSender` sends them to live engines.
"""
