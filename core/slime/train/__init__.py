"""Training on Megatron-core, one process per rank: `rank.MegatronRank` is the entry.

Importing this package has megatron-core prepared by the device's platform, because that must happen before the first
import of `megatron.core`.
"""

import torch

from slime.platform import platform_of

platform_of("cuda" if torch.cuda.is_available() else "cpu").prepare_trainer()
