"""Patches that let stock Megatron-core and SGLang run without a GPU; they do nothing on a machine with one."""
