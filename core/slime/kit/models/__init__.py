"""What the authors of model families use: strict readers of `config.json`, and rules for the usual layers.

None of it needs torch.
"""

from slime.kit.models.config import (
    at_least_zero,
    boolean,
    full_attention,
    no_effect,
    positive_float,
    positive_int,
    require,
    rope,
    rope_table,
)
from slime.kit.models.rules import (
    attention_rules,
    embedding_rules,
    gated_mlp_rules,
    latent_attention_rules,
    mixture_rules,
    norm_rule,
    predicting_layers,
)

__all__ = [
    "at_least_zero",
    "attention_rules",
    "boolean",
    "embedding_rules",
    "full_attention",
    "gated_mlp_rules",
    "latent_attention_rules",
    "mixture_rules",
    "no_effect",
    "norm_rule",
    "positive_float",
    "positive_int",
    "predicting_layers",
    "require",
    "rope",
    "rope_table",
]
