#!/bin/bash
# Written by `slime launch`: one job on a Ray cluster that runs, whose nodes have slime and this folder.
set -euo pipefail
/venv/bin/ray job submit --no-wait --address http://head:8265 --submission-id first-2026-01-02-030405 -- \
  bash -c 'cd /home/me && exec /venv/bin/slime train /data/outputs/first/launch/run_2026-01-02_030405.toml --run-name first --device cuda --resume auto --ray-address auto'
