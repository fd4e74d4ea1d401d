"""Ways for weights to travel from trainer rank 0 to live engines.

distributed: broadcast in a process group shared with the engines (gloo or NCCL).  tensor: handles of shared
memory (CPU) or CUDA IPC, for engines on the same machine.  disk: a Hugging Face folder all can read.
"""
