# DeepSeek-R1, which has the architecture of DeepSeek-V3.
source "$(dirname -- "${BASH_SOURCE[0]}")/deepseek-v3.sh"
# hf download deepseek-ai/DeepSeek-R1 --local-dir models/DeepSeek-R1
# slime convert models/DeepSeek-R1 models/DeepSeek-R1-bf16
# HF_CHECKPOINT and SAVE_DIR choose other folders.
CKPT_ARGS=(
    --hf-checkpoint "${HF_CHECKPOINT:-models/DeepSeek-R1-bf16}"
    --save "${SAVE_DIR:-checkpoints/deepseek-r1}"
)
