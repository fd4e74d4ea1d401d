# GLM-4.5-Air
MODEL_ARGS=(
    --num-layers 46
    --hidden-size 4096
    --ffn-hidden-size 10944
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
    --use-rotary-position-embeddings
    --rotary-base 1000000
    --rotary-percent 0.5
    --num-experts 128
    --moe-router-topk 8
    --moe-ffn-hidden-size 1408
    --moe-shared-expert-intermediate-size 1408
    --moe-layer-freq "[0]*1+[1]*45"
    --moe-router-score-function sigmoid
    --moe-router-pre-softmax
    --moe-router-enable-expert-bias
    --moe-router-topk-scaling-factor 1
    --moe-grouped-gemm
)
# hf download zai-org/GLM-4.5-Air --local-dir models/GLM-4.5-Air
# HF_CHECKPOINT and SAVE_DIR choose other folders.
CKPT_ARGS=(
    --hf-checkpoint "${HF_CHECKPOINT:-models/GLM-4.5-Air}"
    --save "${SAVE_DIR:-checkpoints/glm4.5-106B-A12B}"
)
