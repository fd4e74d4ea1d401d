# Meta-Llama-3-70B-Instruct and Meta-Llama-3-70B
MODEL_ARGS=(
    --num-layers 80
    --hidden-size 8192
    --ffn-hidden-size 28672
    --num-attention-heads 64
    --group-query-attention
    --num-query-groups 8
    --vocab-size 128256
    --untie-embeddings-and-output-weights
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --swiglu
    --disable-bias-linear
    --use-rotary-position-embeddings
    --rotary-base 500000
)
# hf download meta-llama/Meta-Llama-3-70B-Instruct --local-dir models/Meta-Llama-3-70B-Instruct
# HF_CHECKPOINT and SAVE_DIR choose other folders.
CKPT_ARGS=(
    --hf-checkpoint "${HF_CHECKPOINT:-models/Meta-Llama-3-70B-Instruct}"
    --save "${SAVE_DIR:-checkpoints/llama3-70B}"
)
