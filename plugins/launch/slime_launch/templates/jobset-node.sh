{% include "node.sh" %}
attempt={{ launch | sh }}/attempt_{{ submission }}_${JOBSET}_${RESTART}
names=$(for ((index = 0; index < {{ nodes }}; index++)); do printf '{{ job_name }}-nodes-0-%d ' "$index"; done)
rank=$JOB_COMPLETION_INDEX
name={{ job_name }}-nodes-0-$rank
mkdir -p "$attempt"
export attempt names rank name
# Kubernetes asks the first process of each pod to end: the run saves, and then all of them end.
trap ': >"$attempt/stop"' TERM
node
