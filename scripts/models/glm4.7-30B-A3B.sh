# GLM-4.7-Flash
MODEL_ARGS=(
    --num-layers 47
    --hidden-size 2048
    --ffn-hidden-size 10240
    --num-attention-heads 20
    --vocab-size 154880
    --untie-embeddings-and-output-weights
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --swiglu
    --disable-bias-linear
    --qk-layernorm
    --use-rotary-position-embeddings
    --rotary-base 1000000
    --multi-latent-attention
    --q-lora-rank 768
    --kv-lora-rank 512
    --qk-head-dim 192
    --qk-pos-emb-head-dim 64
    --v-head-dim 256
    --rope-type rope
    --num-experts 64
    --moe-router-topk 4
    --moe-ffn-hidden-size 1536
    --moe-shared-expert-intermediate-size 1536
    --moe-layer-freq "[0]*1+[1]*46"
    --moe-router-score-function sigmoid
    --moe-router-pre-softmax
    --moe-router-enable-expert-bias
    --moe-router-topk-scaling-factor 1.8
    --moe-grouped-gemm
)
# hf download zai-org/GLM-4.7-Flash --local-dir models/GLM-4.7-Flash
# HF_CHECKPOINT and SAVE_DIR choose other folders.
CKPT_ARGS=(
    --hf-checkpoint "${HF_CHECKPOINT:-models/GLM-4.7-Flash}"
    --save "${SAVE_DIR:-checkpoints/glm4.7-30B-A3B}"
)
