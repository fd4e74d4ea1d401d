"""What makes stock Megatron-core and SGLang run without a GPU; inert where there is one."""
