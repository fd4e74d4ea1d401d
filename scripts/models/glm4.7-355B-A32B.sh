# GLM-4.7, which has the architecture of GLM-4.5.
source "$(dirname -- "${BASH_SOURCE[0]}")/glm4.5-355B-A32B.sh"
# hf download zai-org/GLM-4.7 --local-dir models/GLM-4.7
# HF_CHECKPOINT and SAVE_DIR choose other folders.
CKPT_ARGS=(
    --hf-checkpoint "${HF_CHECKPOINT:-models/GLM-4.7}"
    --save "${SAVE_DIR:-checkpoints/glm4.7-355B-A32B}"
)
