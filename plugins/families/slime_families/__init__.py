"""slime's own model families, registered like those of any other plugin."""

from __future__ import annotations

from slime.plugin import FamilySpec, hookimpl
from slime_families.examples import example

slime_api = 1

_DOCS = "docs/models.md"


def _family(name: str, factory: str, causal_lm: str, summary: str, not_served: str = "") -> FamilySpec:
    return FamilySpec(
        name=name,
        factory=f"slime_families.{factory}",
        model_types=(name,),
        causal_lm=causal_lm,
        summary=summary,
        not_served=not_served,
        docs=_DOCS,
        example=example(name),
    )


@hookimpl
def slime_register_families() -> list[FamilySpec]:
    """The model families of this package."""
    return [
        _family("llama", "dense:Llama", "LlamaForCausalLM", "Llama 2, 3, 3.1, 3.2, with the rope scaling of 3.1"),
        _family("qwen2", "dense:Qwen2", "Qwen2ForCausalLM", "Qwen2 and Qwen2.5, dense"),
        _family("qwen3", "dense:Qwen3", "Qwen3ForCausalLM", "Qwen3, dense"),
        _family("qwen3_moe", "qwen3_moe:Qwen3Moe", "Qwen3MoeForCausalLM", "Qwen3-30B-A3B, Qwen3-235B-A22B"),
        _family(
            "glm",
            "glm:Glm",
            "GlmForCausalLM",
            "GLM-4-9B, for supervised training",
            "SGLang 0.5.23 has no class for GlmForCausalLM; it serves the family glm4 (GLM-4-9B-0414, Z1)",
        ),
        _family("glm4", "glm:Glm4", "Glm4ForCausalLM", "GLM-4-0414 and Z1, 9B and 32B"),
        _family("glm4_moe", "glm4_moe:Glm4Moe", "Glm4MoeForCausalLM", "GLM-4.5, 4.5-Air, 4.6, 4.7"),
        _family("glm4_moe_lite", "glm4_moe:Glm4MoeLite", "Glm4MoeLiteForCausalLM", "GLM-4.7-Flash"),
        _family(
            "deepseek_v3", "deepseek:DeepseekV3", "DeepseekV3ForCausalLM", "DeepSeek-V3, V3.1, R1 and Moonlight-16B-A3B"
        ),
        _family("kimi_k2", "deepseek:DeepseekV3", "DeepseekV3ForCausalLM", "Kimi K2"),
    ]
