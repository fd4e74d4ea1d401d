# DeepSeek-V3.1, which has the architecture of DeepSeek-V3.
source "$(dirname -- "${BASH_SOURCE[0]}")/deepseek-v3.sh"
# hf download deepseek-ai/DeepSeek-V3.1 --local-dir models/DeepSeek-V3.1
# slime convert models/DeepSeek-V3.1 models/DeepSeek-V3.1-bf16
# HF_CHECKPOINT and SAVE_DIR choose other folders.
CKPT_ARGS=(
    --hf-checkpoint "${HF_CHECKPOINT:-models/DeepSeek-V3.1-bf16}"
    --save "${SAVE_DIR:-checkpoints/deepseek-v3.1}"
)
