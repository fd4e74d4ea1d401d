# Kimi-K2-Instruct; ROTARY_SCALING_FACTOR=64 for Kimi-K2-Instruct-0905
MODEL_ARGS=(
    --num-layers 61
    --hidden-size 7168
    --ffn-hidden-size 18432
    --num-attention-heads 64
    --vocab-size 163840
    --untie-embeddings-and-output-weights
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --swiglu
    --disable-bias-linear
    --qk-layernorm
    --use-rotary-position-embeddings
    --rotary-base 50000
    --multi-latent-attention
    --q-lora-rank 1536
    --kv-lora-rank 512
    --qk-head-dim 128
    --qk-pos-emb-head-dim 64
    --v-head-dim 128
    --rope-type yarn
    --rotary-scaling-factor "${ROTARY_SCALING_FACTOR:-32}"
    --original-max-position-embeddings 4096
    --beta-fast 1
    --beta-slow 1
    --mscale 1.0
    --mscale-all-dim 1.0
    --num-experts 384
    --moe-router-topk 8
    --moe-ffn-hidden-size 2048
    --moe-shared-expert-intermediate-size 2048
    --moe-layer-freq "[0]*1+[1]*60"
    --moe-router-score-function sigmoid
    --moe-router-pre-softmax
    --moe-router-enable-expert-bias
    --moe-router-topk-scaling-factor 2.827
    --moe-grouped-gemm
)
# hf download moonshotai/Kimi-K2-Instruct --local-dir models/Kimi-K2-Instruct
# slime convert models/Kimi-K2-Instruct models/Kimi-K2-Instruct-bf16
# The tokenizer is a Python file in the model folder: read it, and add --trust-remote-code to the run.
# HF_CHECKPOINT and SAVE_DIR choose other folders.
CKPT_ARGS=(
    --hf-checkpoint "${HF_CHECKPOINT:-models/Kimi-K2-Instruct-bf16}"
    --save "${SAVE_DIR:-checkpoints/kimi-k2}"
)
