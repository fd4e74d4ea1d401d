# DeepSeek-V3
MODEL_ARGS=(
    --num-layers 61
    --hidden-size 7168
    --ffn-hidden-size 18432
    --num-attention-heads 128
    --vocab-size 129280
    --untie-embeddings-and-output-weights
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --swiglu
    --disable-bias-linear
    --qk-layernorm
    --use-rotary-position-embeddings
    --rotary-base 10000
    --multi-latent-attention
    --q-lora-rank 1536
    --kv-lora-rank 512
    --qk-head-dim 128
    --qk-pos-emb-head-dim 64
    --v-head-dim 128
    --rope-type yarn
    --rotary-scaling-factor 40
    --original-max-position-embeddings 4096
    --beta-fast 32
    --beta-slow 1
    --mscale 1.0
    --mscale-all-dim 1.0
    --num-experts 256
    --moe-router-topk 8
    --moe-ffn-hidden-size 2048
    --moe-shared-expert-intermediate-size 2048
    --moe-layer-freq "[0]*3+[1]*58"
    --moe-router-score-function sigmoid
    --moe-router-pre-softmax
    --moe-router-enable-expert-bias
    --moe-router-topk-scaling-factor 2.5
    --moe-router-num-groups 8
    --moe-router-group-topk 4
    --moe-grouped-gemm
)
# hf download deepseek-ai/DeepSeek-V3 --local-dir models/DeepSeek-V3
# slime convert models/DeepSeek-V3 models/DeepSeek-V3-bf16
# HF_CHECKPOINT and SAVE_DIR choose other folders.
CKPT_ARGS=(
    --hf-checkpoint "${HF_CHECKPOINT:-models/DeepSeek-V3-bf16}"
    --save "${SAVE_DIR:-checkpoints/deepseek-v3}"
)
