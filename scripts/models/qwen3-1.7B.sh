# Qwen3-1.7B
MODEL_ARGS=(
    --num-layers 28
    --hidden-size 2048
    --ffn-hidden-size 6144
    --num-attention-heads 16
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --vocab-size 151936
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --swiglu
    --disable-bias-linear
    --qk-layernorm
    --use-rotary-position-embeddings
    --rotary-base 1000000
)
# hf download Qwen/Qwen3-1.7B --local-dir models/Qwen3-1.7B
# HF_CHECKPOINT and SAVE_DIR choose other folders.
CKPT_ARGS=(
    --hf-checkpoint "${HF_CHECKPOINT:-models/Qwen3-1.7B}"
    --save "${SAVE_DIR:-checkpoints/qwen3-1.7B}"
)
