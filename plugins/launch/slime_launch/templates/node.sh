{#- What every node of a cluster runs that has a shared folder and no Ray of its own: the same on all of them, in no order.
    Variables of the script that includes it: rank, name, names, attempt. -#}
fail() {
  echo "slime launch: node ${name:-?}: $*" >&2
  exit 1
}

node() {
  set -euo pipefail
{%- for path, lack in readable %}
  [ -r {{ path | sh }} ] || fail {{ (path ~ " cannot be read here: " ~ lack) | sh }}
{%- endfor %}
  cd {{ folder | sh }} || fail "no such folder here"
  ulimit -n 65536 2>/dev/null || ulimit -n "$(ulimit -H -n)"
{%- if setup %}
  # What is written for login shells, such as `module`, is not there yet, and reads variables that are not set.
  local path=$PATH
  set +u
  # shellcheck disable=SC1091 # of the node
  [ ! -r /etc/profile ] || . /etc/profile || true
  PATH=$path:$PATH
{%- for line in setup %}
  {{ line }}
{%- endfor %}
  set -u
{%- endif %}
  local head='' ray port code=0 places second late=0
  if [ "$rank" -gt 0 ]; then
    until [ -s "$attempt/head" ]; do
      [ ! -e "$attempt/stop" ] || return 0
      [ "$SECONDS" -lt {{ join_timeout_s }} ] || fail "the first node did not start Ray within {{ join_timeout_s }} s: its log is in $attempt"
      sleep 1
    done
    head=$(<"$attempt/head")
  fi
  # The address that the others reach, the interface that has it, and the InfiniBand devices that are up.
  places=$({{ python }} -m slime_launch.node_settings{{ (" --interface " ~ (interface | sh)) if interface else "" }} --head "$head" --names "$names" --port "$((20000 + ${SLURM_JOB_ID:-0} % 10000))") || fail "see above"
  eval "$places"
  RAY_TMPDIR=$(mktemp -d /tmp/slime-ray-XXXXXX)
  export RAY_TMPDIR
  trap 'rm -rf "$RAY_TMPDIR"' EXIT
  set -- --node-ip-address="$SLIME_NODE_ADDRESS" --node-name="$name" --temp-dir="$RAY_TMPDIR" --disable-usage-stats --block
{%- if cpus_per_node %}
  # Others may have jobs on the node: Ray counts its own CPUs alone, and its processes take any free port.
  set -- "$@" --num-cpus={{ cpus_per_node }} --min-worker-port=0 --max-worker-port=0 --dashboard-agent-listen-port=0
{%- endif %}
{%- if gpus_per_node %}
  set -- "$@" --num-gpus={{ gpus_per_node }}
{%- endif %}
  if [ "$rank" -eq 0 ]; then
    port=$SLIME_HEAD_PORT
    {{ ray }} start --head --port="$port" --include-dashboard=false "$@" &
    ray=$!
    until (: <"/dev/tcp/$SLIME_NODE_ADDRESS/$port") 2>/dev/null; do
      kill -0 "$ray" 2>/dev/null || fail "Ray did not start: see above"
      [ "$SECONDS" -lt {{ join_timeout_s }} ] || fail "Ray did not start within {{ join_timeout_s }} s"
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
    {{ ray }} start --address="$head" "$@" &
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
  local head=$1{% if not interactive %} run code=0{% endif %}
  # shellcheck disable=SC2086 # one word each
  {{ python }} -m slime_launch.wait_for_nodes "$head" --timeout-s {{ join_timeout_s }} --stop "$attempt/stop" $names || return $?
{%- if interactive %}
  echo "slime launch: the cluster $head is ready and idle; 'touch $attempt/stop' ends it"
  until [ -e "$attempt/stop" ]; do sleep 1; done
{%- else %}
  # The driver never outlives this shell: it would keep the run folder from the next job. When this shell is asked to
  # end, so is the driver, and the shell waits for it, because it may be saving.
  local with=(env)
  ! command -v setpriv >/dev/null || with=(setpriv --pdeathsig KILL)
  trap ': >"$attempt/stop"' TERM
  "${with[@]}" {{ train | shlex }} --ray-address "$head"{% if train_log %} >>"$attempt/train.log" 2>&1{% endif %} &
  run=$!
  while kill -0 "$run" 2>/dev/null; do
    if [ -e "$attempt/stop" ]; then
      kill -TERM "$run" 2>/dev/null || true
      break
    fi
    sleep 1
  done
  # A signal ends a wait early, with a code of its own. After the end, `wait` gives the code of the driver, which bash keeps.
  while kill -0 "$run" 2>/dev/null; do wait "$run" || true; done
  wait "$run" || code=$?
{%- if train_log %}
  [ "$code" -eq 0 ] || tail -n 20 "$attempt/train.log" >&2
{%- endif %}
  return "$code"
{%- endif %}
}
