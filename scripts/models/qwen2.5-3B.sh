# Qwen2.5-3B-Instruct and Qwen2.5-3B
MODEL_ARGS=(
    --num-layers 36
    --hidden-size 2048
    --ffn-hidden-size 11008
    --num-attention-heads 16
    --group-query-attention
    --num-query-groups 2
    --vocab-size 151936
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --swiglu
    --disable-bias-linear
    --add-qkv-bias
    --use-rotary-position-embeddings
    --rotary-base 1000000
)
# hf download Qwen/Qwen2.5-3B-Instruct --local-dir models/Qwen2.5-3B-Instruct
# HF_CHECKPOINT and SAVE_DIR choose other folders.
CKPT_ARGS=(
    --hf-checkpoint "${HF_CHECKPOINT:-models/Qwen2.5-3B-Instruct}"
    --save "${SAVE_DIR:-checkpoints/qwen2.5-3B}"
)
