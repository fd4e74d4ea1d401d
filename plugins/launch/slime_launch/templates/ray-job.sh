#!/bin/bash
# Written by `slime launch`: one job on a Ray cluster that runs, whose nodes have slime and this folder.
set -euo pipefail
{{ ray }} job submit --no-wait{{ (" --address " ~ (address | sh)) if address else "" }} --submission-id {{ submission }} -- \
  {{ ["bash", "-c", entry] | shlex }}
