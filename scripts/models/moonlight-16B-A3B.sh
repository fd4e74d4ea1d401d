# Moonlight-16B-A3B-Instruct and Moonlight-16B-A3B
MODEL_ARGS=(
    --num-layers 27
    --hidden-size 2048
    --ffn-hidden-size 11264
    --num-attention-heads 16
    --vocab-size 163840
    --untie-embeddings-and-output-weights
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --swiglu
    --disable-bias-linear
    --qk-layernorm
    --use-rotary-position-embeddings
    --rotary-base 50000
    --multi-latent-attention
    --kv-lora-rank 512
    --qk-head-dim 128
    --qk-pos-emb-head-dim 64
    --v-head-dim 128
    --rope-type rope
    --num-experts 64
    --moe-router-topk 6
    --moe-ffn-hidden-size 1408
    --moe-shared-expert-intermediate-size 2816
    --moe-layer-freq "[0]*1+[1]*26"
    --moe-router-score-function sigmoid
    --moe-router-pre-softmax
    --moe-router-enable-expert-bias
    --moe-router-topk-scaling-factor 2.446
    --moe-grouped-gemm
)
# hf download moonshotai/Moonlight-16B-A3B-Instruct --local-dir models/Moonlight-16B-A3B-Instruct
# The tokenizer is a Python file in the model folder: read it, and add --trust-remote-code to the run.
# HF_CHECKPOINT and SAVE_DIR choose other folders.
CKPT_ARGS=(
    --hf-checkpoint "${HF_CHECKPOINT:-models/Moonlight-16B-A3B-Instruct}"
    --save "${SAVE_DIR:-checkpoints/moonlight-16B-A3B}"
)
