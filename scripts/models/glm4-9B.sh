# GLM-Z1-9B-0414 and GLM-4-9B-0414
MODEL_ARGS=(
    --num-layers 40
    --hidden-size 4096
    --ffn-hidden-size 13696
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 2
    --kv-channels 128
    --vocab-size 151552
    --untie-embeddings-and-output-weights
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --swiglu
    --disable-bias-linear
    --add-qkv-bias
    --post-self-attn-layernorm
    --post-mlp-layernorm
    --use-rotary-position-embeddings
    --rotary-base 10000
    --rotary-percent 0.5
    --rotary-interleaved
)
# hf download zai-org/GLM-Z1-9B-0414 --local-dir models/GLM-Z1-9B-0414
# HF_CHECKPOINT and SAVE_DIR choose other folders.
CKPT_ARGS=(
    --hf-checkpoint "${HF_CHECKPOINT:-models/GLM-Z1-9B-0414}"
    --save "${SAVE_DIR:-checkpoints/glm4-9B}"
)
