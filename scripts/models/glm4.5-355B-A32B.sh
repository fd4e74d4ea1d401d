# GLM-4.5
MODEL_ARGS=(
    --num-layers 92
    --hidden-size 5120
    --ffn-hidden-size 12288
    --num-attention-heads 96
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --vocab-size 151552
    --untie-embeddings-and-output-weights
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --swiglu
    --disable-bias-linear
    --add-qkv-bias
    --qk-layernorm
    --use-rotary-position-embeddings
    --rotary-base 1000000
    --rotary-percent 0.5
    --num-experts 160
    --moe-router-topk 8
    --moe-ffn-hidden-size 1536
    --moe-shared-expert-intermediate-size 1536
    --moe-layer-freq "[0]*3+[1]*89"
    --moe-router-score-function sigmoid
    --moe-router-pre-softmax
    --moe-router-enable-expert-bias
    --moe-router-topk-scaling-factor 2.5
    --moe-grouped-gemm
)
# hf download zai-org/GLM-4.5 --local-dir models/GLM-4.5
# HF_CHECKPOINT and SAVE_DIR choose other folders.
CKPT_ARGS=(
    --hf-checkpoint "${HF_CHECKPOINT:-models/GLM-4.5}"
    --save "${SAVE_DIR:-checkpoints/glm4.5-355B-A32B}"
)
