# Qwen3-235B-A22B
MODEL_ARGS=(
    --num-layers 94
    --hidden-size 4096
    --ffn-hidden-size 12288
    --num-attention-heads 64
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
    --moe-ffn-hidden-size 1536
    --moe-layer-freq 1
    --moe-router-score-function softmax
    --moe-grouped-gemm
)
# hf download Qwen/Qwen3-235B-A22B --local-dir models/Qwen3-235B-A22B
# HF_CHECKPOINT and SAVE_DIR choose other folders.
CKPT_ARGS=(
    --hf-checkpoint "${HF_CHECKPOINT:-models/Qwen3-235B-A22B}"
    --save "${SAVE_DIR:-checkpoints/qwen3-235B-A22B}"
)
