#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# For a job script, before training starts or starts again (a requeue after a fault): puts the newest
# state together out of the store and the memory of agents, and prints the folder to load. Prints
# nothing when there is no checkpoint yet: training starts from iteration 0.
#   load=$(scripts/slurm/pec-restore-hook.sh STORE OUT [FLAG...]) || exit
#   srun python train.py ${load:+--load "$load"}
# OUT is replaced. FLAGs are those of pec-restore: --agents unix:SOCKET for the agent of this node, and
# --agents HOST:PORT for those of others, which need their key: SHARDWRIGHT_AGENT_KEY names its file,
# or --key FILE. An agent that does not answer counts as lost with its node, unless --lost-nodes names
# the lost ones; one with another key is an error.
# The script must prove that there is no checkpoint yet. At the first start, when neither OUT nor a
# line of tokens nor Slurm (SLURM_RESTART_COUNT) shows an earlier one, and no agent has a checkpoint,
# it makes a missing STORE, with a mark that the run has begun; the parent folder must exist. From
# then on a STORE that is missing, empty or unreadable is an error, and nothing is
# changed.
# PEC_TOKENS  file of tokens per expert, one JSON line for each iteration: lines after the iteration
#             that training resumes from are removed, and so is a truncated last line of a killed run.
#             Must not be a file or link of another user
# PEC_REPORT  where to write the report of the restore; default OUT.report.json
# Exit codes: those of pec-restore; 6 also for a PEC_TOKENS of another user.
set -euo pipefail
# No command here waits for other processes, whatever launcher has started this one.
export SHARDWRIGHT_MPI=none

if [[ $# -lt 2 ]]; then
  echo "usage: pec-restore-hook.sh STORE OUT [FLAG...]" >&2
  exit 2
fi
store=$1 out=${2%/}
report=${PEC_REPORT:-$out.report.json}

# A name that another user has made, or put a link in place of, could be of any file of this user.
# own FILE: fails unless it belongs to this user; some file systems report one other owner for all files.
own() {
  local owner probe
  owner=$(stat -c %u -- "$1")
  [[ $owner != "$(id -u)" ]] || return 0
  probe=$(mktemp "$(dirname -- "$1")/.user.XXXXXXXX") || return 1
  [[ $owner == "$(stat -c %u -- "$probe")" ]]
  local code=$?
  rm -f -- "$probe"
  return "$code"
}
log=()
if [[ -n ${PEC_TOKENS:-} ]]; then
  if [[ -e $PEC_TOKENS || -L $PEC_TOKENS ]] && ! own "$PEC_TOKENS"; then
    echo "pec-restore-hook: $PEC_TOKENS belongs to user $(stat -c '%U (%u)' -- "$PEC_TOKENS"), not to you: remove it, or keep the" \
      "log in a folder of your own" >&2
    exit 6
  fi
  log=(--trim-tokens "$PEC_TOKENS")
fi
flags=(--allow-empty)
if [[ ! -e $out && ! -L $out && ! -s ${PEC_TOKENS:-} && ${SLURM_RESTART_COUNT:-0} == 0 ]]; then
  flags+=(--begin)
elif [[ ! -e $store ]]; then
  echo "pec-restore-hook: $store does not exist, but the run is not new: $out or ${PEC_TOKENS:-a log of tokens} exists," \
    "or SLURM_RESTART_COUNT (${SLURM_RESTART_COUNT:-0}) is not 0" >&2
fi
if [[ " ${*:3}" == *" --agents"* && " ${*:3}" != *" --lost-nodes"* ]]; then
  flags+=(--lost-nodes unreachable)
fi
# restore FLAG...: restores the store to OUT.
restore() {
  rm -f "$report"
  pec-restore "$store" "$out" --restart --force --take-over -q --json="$report" "${flags[@]}" "${log[@]}" "$@" >/dev/null
}
stopped=
for partial in "$out".partial-*; do
  # The pattern itself if no file matches it.
  [[ ! -e $partial ]] || stopped=1
done
code=0
restore "${@:3}" || code=$?
if [[ $code -eq 6 && -n $stopped ]]; then
  echo "pec-restore-hook: the stopped restore was of an older state of the store: starting again" >&2
  code=0
  restore "${@:3}" --no-resume || code=$?
fi
[[ $code -eq 0 ]] || exit "$code"
resume=$(sed -n 's/^  "iteration": \([0-9]\{1,\}\|null\),$/\1/p' "$report")
case $resume in
  null) ;;
  [0-9]*) echo "$out" ;;
  *)
    echo "pec-restore-hook: $report does not contain the restored iteration" >&2
    exit 4
    ;;
esac
