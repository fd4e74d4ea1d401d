# Qwen3-30B-A3B
MODEL_ARGS=(
    --num-layers 48
    --hidden-size 2048
    --ffn-hidden-size 6144
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 4
    --kv-channels 128
    --vocab-size 151936
    --untie-embeddings-and-output-weights
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --swiglu
    --disable-bias-linear
    --qk-layernorm
    --use-rotary-position-embeddings
    --rotary-base 1000000
    --num-experts 128
    --moe-router-topk 8
    --moe-ffn-hidden-size 768
    --moe-layer-freq 1
    --moe-router-score-function softmax
    --moe-grouped-gemm
)
# hf download Qwen/Qwen3-30B-A3B --local-dir models/Qwen3-30B-A3B
# HF_CHECKPOINT and SAVE_DIR choose other folders.
CKPT_ARGS=(
    --hf-checkpoint "${HF_CHECKPOINT:-models/Qwen3-30B-A3B}"
    --save "${SAVE_DIR:-checkpoints/qwen3-30B-A3B}"
)
