#!/usr/bin/env bash
# For a job script, before training starts or starts again (a requeue after a fault): puts the newest
# state together out of the store and the memory of agents, and prints the folder to load. Prints
# nothing when there is no checkpoint yet: training starts anew.
#   load=$(scripts/slurm/pec-restore-hook.sh STORE OUT [FLAG...]) || exit
#   srun python train.py ${load:+--load "$load"}
# OUT is replaced. FLAGs are those of pec-restore: --agents unix:SOCKET for the agent of this node, and
# --agents HOST:PORT for those of others. An agent that does not answer counts as lost with its
# node, unless --lost-nodes says which ones are.
# PEC_TOKENS  file of tokens per expert, one JSON line for each iteration: lines after the iteration
#             that training goes on from are removed, and so is a line that a kill has torn
# PEC_REPORT  where to write the report of the restore; default OUT.report.json
# Exit codes: those of pec-restore.
set -euo pipefail

if [[ $# -lt 2 ]]; then
  echo "usage: pec-restore-hook.sh STORE OUT [FLAG...]" >&2
  exit 2
fi
store=$1 out=${2%/}
report=${PEC_REPORT:-$out.report.json}

# forget ITERATION: what the run that ended has counted after it.
forget() {
  [[ -n ${PEC_TOKENS:-} && -f $PEC_TOKENS ]] || return 0
  python3 - "$PEC_TOKENS" "$1" <<'EOF'
import json
import os
import sys

path, last = sys.argv[1], int(sys.argv[2])
kept = []
with open(path, encoding="utf-8") as lines:
    for line in lines:
        if line.endswith("\n") and json.loads(line)["iteration"] <= last:
            kept.append(line)
with open(path + ".new", "w", encoding="utf-8") as out:
    out.writelines(kept)
    out.flush()
    os.fsync(out.fileno())
os.replace(path + ".new", path)
EOF
}

has_checkpoint() {
  compgen -G "$store/manifests/*.json" >/dev/null
}

# Before the first save is complete an agent may hold the only checkpoint, or be about to save it.
if ! has_checkpoint; then
  IFS=', ' read -r -a words <<<"${*:3}"
  for word in "${words[@]#--agents=}"; do
    case $word in
      unix:* | *:*)
        code=0
        pec-save "$word" --tell flush -q >/dev/null || code=$?
        # An agent that is not there has nothing; one that cannot save what it has must not be ignored.
        [[ $code -eq 0 || $code -eq 3 ]] || exit "$code"
        ;;
    esac
  done
fi
if ! has_checkpoint; then
  forget 0
  exit 0
fi
rm -f "$report"
lost=()
if [[ " ${*:3}" == *" --agents"* && " ${*:3}" != *" --lost-nodes"* ]]; then
  lost=(--lost-nodes unreachable)
fi
code=0
pec-restore "$store" "$out" --force -q --json="$report" "${lost[@]}" "${@:3}" >/dev/null || code=$?
[[ $code -eq 0 ]] || exit "$code"
forget "$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["iteration"])' "$report")"
echo "$out"
