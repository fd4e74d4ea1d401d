# Qwen2.5-7B-Instruct and Qwen2.5-7B
MODEL_ARGS=(
    --num-layers 28
    --hidden-size 3584
    --ffn-hidden-size 18944
    --num-attention-heads 28
    --group-query-attention
    --num-query-groups 4
    --vocab-size 152064
    --untie-embeddings-and-output-weights
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --swiglu
    --disable-bias-linear
    --add-qkv-bias
    --use-rotary-position-embeddings
    --rotary-base 1000000
)
# hf download Qwen/Qwen2.5-7B-Instruct --local-dir models/Qwen2.5-7B-Instruct
# HF_CHECKPOINT and SAVE_DIR choose other folders.
CKPT_ARGS=(
    --hf-checkpoint "${HF_CHECKPOINT:-models/Qwen2.5-7B-Instruct}"
    --save "${SAVE_DIR:-checkpoints/qwen2.5-7B}"
)
