"""What stock Megatron-core and SGLang need to run without a GPU, offered to slime as the platform `cpu`."""
