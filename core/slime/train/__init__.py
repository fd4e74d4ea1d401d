"""Training on Megatron-core, one process per rank: `rank.MegatronRank` is the entry.

Importing this package prepares megatron-core for machines without CUDA (and does nothing on machines with CUDA),
because that must happen before the first import of `megatron.core`.
"""

from slime.cpu.megatron import install

install()
