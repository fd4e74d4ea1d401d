#!/bin/bash
# Written by `slime launch`: Ray on all nodes, and `slime train` on the first one.
#SBATCH --job-name={{ job_name }}
#SBATCH --nodes={{ nodes }}
#SBATCH --ntasks-per-node=1
{%- if cpus_per_node %}
#SBATCH --cpus-per-task={{ cpus_per_node }}
{%- else %}
#SBATCH --exclusive
#SBATCH --mem=0
{%- endif %}
{%- if gres %}
#SBATCH --gres={{ gres }}:{{ gpus_per_node }}
{%- endif %}
{%- if partition %}
#SBATCH --partition={{ partition }}
{%- endif %}
{%- if account %}
#SBATCH --account={{ account }}
{%- endif %}
{%- if time %}
#SBATCH --time={{ time }}
{%- endif %}
{%- if after %}
#SBATCH --dependency=afterany:{{ after | join(":") }}
{%- endif %}
#SBATCH --requeue
# To this script alone, in time to save: Ray's processes would end by SIGTERM before the run has saved.
#SBATCH --signal=B:TERM@{{ signal_s }}
#SBATCH --chdir={{ folder }}
#SBATCH --output={{ launch }}/slurm-%j.log
#SBATCH --open-mode=append
# Nothing else of the environment is kept with the job: keys are in a file that only you can read.
#SBATCH --export=HOME,PATH,USER,LANG
# shellcheck disable=SC2154,SC2317,SC2329 # functions for the shells of the nodes
set -euo pipefail
export SLURM_EXPORT_ENV=ALL

{% include "node.sh" %}
name=$SLURMD_NODENAME
{%- for path, lack in readable %}
[ -r {{ path | sh }} ] || fail {{ (path ~ " cannot be read here: " ~ lack) | sh }}
{%- endfor %}
set -a
# shellcheck disable=SC1091 # made beside this script
. {{ launch | sh }}/secrets.env
set +a
attempt={{ launch | sh }}/attempt_${SLURM_JOB_ID}_${SLURM_RESTART_COUNT:-0}
names=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | tr '\n' ' ')
mkdir -p "$attempt"
export attempt names
echo "slime launch: job $SLURM_JOB_ID on $names; logs in $attempt"

requeue=no
# SIGTERM: the time is nearly over, another job takes the nodes (where Slurm has send_user_signal), or `scancel`.
# SIGUSR1: `slime launch --stop`.
trap '{% if saves %}requeue=yes; {% endif %}: >"$attempt/stop"' TERM{% if not saves %} # without a new place in the queue: the run saves nothing{% endif %}
trap ': >"$attempt/stop"' USR1
# Nodes that have not ended two minutes after another one are ended.
# shellcheck disable=SC2016 # for the node's shell
srun --ntasks-per-node=1 --kill-on-bad-exit=1 --wait=120 --cpu-bind=none --output="$attempt/%N.log" \
{%- if container == "pyxis" %}
  --container-image={{ image | sh }}{% if mounts %} --container-mounts={{ mounts | join(",") | sh }}{% endif %} \
{%- elif container == "apptainer" %}
  apptainer exec {{ "--nv " if gpus_per_node else "" }}{% for mount in mounts %}--bind {{ mount | sh }} {% endfor %}{{ image | sh }} \
{%- endif %}
  bash -c "$(declare -f fail node lead)"'; rank=$SLURM_PROCID name=$SLURMD_NODENAME; node' &
step=$!
code=0
# A signal ends a wait early, with a code of its own. After the end, `wait` gives the code of the step, which bash keeps.
while kill -0 "$step" 2>/dev/null; do wait "$step" || true; done
wait "$step" || code=$?
saved=no
if [ -s "$attempt/ended" ]; then
  code=$(<"$attempt/ended")
  [ "$code" -ne {{ preempted }} ] || saved=yes
elif [ "$code" -ne 0 ]; then
  tail -n 20 "$attempt"/*.log >&2 || true
fi
echo "slime launch: job $SLURM_JOB_ID ended with $code"
# {{ preempted }} of the run itself: it was asked to end, and has saved. It goes on from there, unless `scancel` ends the job.
if [ "$saved" = yes ] && [ "$requeue" = yes ] && [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" = RUNNING ]; then
  scontrol requeue "$SLURM_JOB_ID"
  sleep 60 # until Slurm has ended this attempt
fi
exit "$code"
