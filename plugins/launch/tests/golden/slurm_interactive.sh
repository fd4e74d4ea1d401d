#!/bin/bash
# Written by `slime launch`: Ray on all nodes, and `slime train` on the first one.
#SBATCH --job-name=first
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --gres=gpu:8
#SBATCH --requeue
# To this script alone, in time to save: Ray's processes would end by SIGTERM before the run has saved.
#SBATCH --signal=B:TERM@330
#SBATCH --chdir=/home/me
#SBATCH --output=/data/outputs/first/launch/slurm-%j.log
#SBATCH --open-mode=append
# Nothing else of the environment is kept with the job: keys are in a file that only you can read.
#SBATCH --export=HOME,PATH,USER,LANG
# shellcheck disable=SC2154,SC2317,SC2329 # functions for the shells of the nodes
set -euo pipefail
export SLURM_EXPORT_ENV=ALL

fail() {
  echo "slime launch: node ${name:-?}: $*" >&2
  exit 1
}

node() {
  set -euo pipefail
  [ -r /data/outputs/first/launch/slurm.sh ] || fail '/data/outputs/first/launch/slurm.sh cannot be read here: --output-dir has to be in a folder that all nodes share'
  cd /home/me || fail "no such folder here"
  ulimit -n 65536 2>/dev/null || ulimit -n "$(ulimit -H -n)"
  local head='' ray port code=0 places second late=0
  if [ "$rank" -gt 0 ]; then
    until [ -s "$attempt/head" ]; do
      [ ! -e "$attempt/stop" ] || return 0
      [ "$SECONDS" -lt 600 ] || fail "the first node did not start Ray within 600 s: its log is in $attempt"
      sleep 1
    done
    head=$(<"$attempt/head")
  fi
  # The address that the others reach, the interface that has it, and the InfiniBand devices that are up.
  places=$(/venv/bin/python -m slime_launch.node_settings --head "$head" --names "$names" --port "$((20000 + ${SLURM_JOB_ID:-0} % 10000))") || fail "see above"
  eval "$places"
  RAY_TMPDIR=$(mktemp -d /tmp/slime-ray-XXXXXX)
  export RAY_TMPDIR
  trap 'rm -rf "$RAY_TMPDIR"' EXIT
  set -- --node-ip-address="$SLIME_NODE_ADDRESS" --node-name="$name" --temp-dir="$RAY_TMPDIR" --disable-usage-stats --block
  set -- "$@" --num-gpus=8
  if [ "$rank" -eq 0 ]; then
    port=$SLIME_HEAD_PORT
    /venv/bin/ray start --head --port="$port" --include-dashboard=false "$@" &
    ray=$!
    until (: <"/dev/tcp/$SLIME_NODE_ADDRESS/$port") 2>/dev/null; do
      kill -0 "$ray" 2>/dev/null || fail "Ray did not start: see above"
      [ "$SECONDS" -lt 600 ] || fail "Ray did not start within 600 s"
      sleep 1
    done
    # What answers may be another's: then Ray has ended, because the port was taken.
    sleep 1
    kill -0 "$ray" 2>/dev/null || fail "Ray did not start: see above"
    head=$SLIME_NODE_ADDRESS:$port
    echo "$head" >"$attempt/head.partial"
    mv "$attempt/head.partial" "$attempt/head"
    lead "$head" || code=$?
    echo "$code" >"$attempt/ended.partial"
    mv "$attempt/ended.partial" "$attempt/ended"
  else
    /venv/bin/ray start --address="$head" "$@" &
    ray=$!
    until [ -e "$attempt/ended" ]; do
      # The first node ends Ray everywhere, maybe before its file is seen here.
      kill -0 "$ray" 2>/dev/null || ((late += 1))
      [ "$late" -lt 90 ] || fail "Ray has ended here: see above"
      sleep 1
    done
  fi
  kill "$ray" 2>/dev/null || true
  for ((second = 0; second < 60; second++)); do
    kill -0 "$ray" 2>/dev/null || break
    sleep 1
  done
  kill -KILL "$ray" 2>/dev/null || true
  wait "$ray" || true
  return "$code"
}

# The first node: wait for the others, then run. A file named `stop` asks the run to save and to end.
lead() {
  local head=$1
  # shellcheck disable=SC2086 # one word each
  /venv/bin/python -m slime_launch.wait_for_nodes "$head" --timeout-s 600 --stop "$attempt/stop" $names || return $?
  echo "slime launch: the cluster $head is ready and idle; 'touch $attempt/stop' ends it"
  until [ -e "$attempt/stop" ]; do sleep 1; done
}

name=$SLURMD_NODENAME
[ -r /data/outputs/first/launch/slurm.sh ] || fail '/data/outputs/first/launch/slurm.sh cannot be read here: --output-dir has to be in a folder that all nodes share'
set -a
# shellcheck disable=SC1091 # made beside this script
. /data/outputs/first/launch/secrets.env
set +a
attempt=/data/outputs/first/launch/attempt_${SLURM_JOB_ID}_${SLURM_RESTART_COUNT:-0}
names=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | tr '\n' ' ')
mkdir -p "$attempt"
export attempt names
echo "slime launch: job $SLURM_JOB_ID on $names; logs in $attempt"

requeue=no
# SIGTERM: the time is nearly over, another job takes the nodes (where Slurm has send_user_signal), or `scancel`.
# SIGUSR1: `slime launch --stop`.
trap 'requeue=yes; : >"$attempt/stop"' TERM
trap ': >"$attempt/stop"' USR1
# Nodes that have not ended two minutes after another one are ended.
# shellcheck disable=SC2016 # for the node's shell
srun --ntasks-per-node=1 --kill-on-bad-exit=1 --wait=120 --cpu-bind=none --output="$attempt/%N.log" \
  bash -c "$(declare -f fail node lead)"'; rank=$SLURM_PROCID name=$SLURMD_NODENAME; node' &
step=$!
code=0
# A signal ends a wait early, with a code of its own. After the end, `wait` gives the code of the step, which bash keeps.
while kill -0 "$step" 2>/dev/null; do wait "$step" || true; done
wait "$step" || code=$?
saved=no
if [ -s "$attempt/ended" ]; then
  code=$(<"$attempt/ended")
  [ "$code" -ne 143 ] || saved=yes
elif [ "$code" -ne 0 ]; then
  tail -n 20 "$attempt"/*.log >&2 || true
fi
echo "slime launch: job $SLURM_JOB_ID ended with $code"
# 143 of the run itself: it was asked to end, and has saved. It goes on from there, unless `scancel` ends the job.
if [ "$saved" = yes ] && [ "$requeue" = yes ] && [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" = RUNNING ]; then
  scontrol requeue "$SLURM_JOB_ID"
  sleep 60 # until Slurm has ended this attempt
fi
exit "$code"
