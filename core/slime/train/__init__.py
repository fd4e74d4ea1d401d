"""Training on Megatron-core: model, log-probabilities, objective, optimizer and their checkpoint, one process a rank.

Importing this package prepares megatron-core for machines without CUDA (and does nothing where there
is CUDA), because that must come before the first import of `megatron.core`.
"""

from slime.cpu.megatron import install

install()
