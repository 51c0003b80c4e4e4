#!/usr/bin/env bash
# For a job script, before training starts or starts again (a requeue after a fault): puts the newest
# state together out of the store and the memory of agents, and prints the folder to load. Prints
# nothing when there is no checkpoint yet: training starts anew.
#   load=$(scripts/slurm/pec-restore-hook.sh STORE OUT [FLAG...]) || exit
#   srun python train.py ${load:+--load "$load"}
# OUT is replaced. FLAGs are those of pec-restore: --agents unix:SOCKET for the agent of this node, and
# --agents HOST:PORT for those of others, which need their key: SHARDWRIGHT_AGENT_KEY names its file,
# or --key FILE. An agent that does not answer counts as lost with its node, unless --lost-nodes says
# which ones are; one with another key is an error.
# That there is no checkpoint yet has to be seen. At the first start, when neither OUT nor a line of
# tokens nor Slurm (SLURM_RESTART_COUNT) tells of an earlier one, and no agent has a checkpoint, a
# STORE that is not there is made, with a mark that the run has begun; the folder that it lies in must
# be there. From then on a STORE that is missing, empty or unreadable is an error, and nothing is
# changed.
# PEC_TOKENS  file of tokens per expert, one JSON line for each iteration: lines after the iteration
#             that training goes on from are removed, and so is a last line that a kill has torn
# PEC_REPORT  where to write the report of the restore; default OUT.report.json
# Exit codes: those of pec-restore; 3 and 4 also for a PEC_TOKENS that cannot be read or is torn
# elsewhere.
set -euo pipefail

if [[ $# -lt 2 ]]; then
  echo "usage: pec-restore-hook.sh STORE OUT [FLAG...]" >&2
  exit 2
fi
store=$1 out=${2%/}
report=${PEC_REPORT:-$out.report.json}

# tokens check: can the log be read? tokens keep ITERATION: removes what the run that ended has
# counted after it.
tokens() {
  [[ -n ${PEC_TOKENS:-} ]] || return 0
  python3 - "$PEC_TOKENS" "$@" <<'EOF'
import json
import os
import shutil
import sys

path, what = sys.argv[1:3]
last = int(sys.argv[3]) if what == "keep" else 0


def fail(code, message):
    print(f"pec-restore-hook: error: {path}: {message}", file=sys.stderr)
    sys.exit(code)


def changes():
    """Each line, and what is kept of it; a log of weeks does not fit memory."""
    with open(path, "rb") as log:
        for number, line in enumerate(log, 1):
            try:
                kept = int(json.loads(line)["iteration"]) <= last
            except (ValueError, KeyError, TypeError):
                if line.endswith(b"\n") and line.strip():
                    fail(4, f"line {number} is no JSON object with an iteration: {line[:60]!r}")
                kept = False
            yield line, line.rstrip(b"\n") + b"\n" if kept else b""


try:
    changed = sum(line != kept for line, kept in changes())
except OSError as error:
    if isinstance(error, FileNotFoundError) and not os.path.islink(path):
        sys.exit(0)  # nothing has been counted yet
    fail(3, error.strerror)
if what == "keep" and changed:
    path = os.path.realpath(path)
    with open(path + ".new", "wb") as new:
        new.writelines(kept for _, kept in changes())
        new.flush()
        os.fsync(new.fileno())
    shutil.copymode(path, path + ".new")
    os.replace(path + ".new", path)
EOF
}

# Known before the store notes where training goes on.
tokens check
flags=(--allow-empty)
if [[ ! -e $out && ! -L $out && ! -s ${PEC_TOKENS:-} && ${SLURM_RESTART_COUNT:-0} == 0 ]]; then
  flags+=(--begin)
elif [[ ! -e $store ]]; then
  echo "pec-restore-hook: the run has begun before: $out or ${PEC_TOKENS:-a log of tokens} is there, or" \
    "SLURM_RESTART_COUNT (${SLURM_RESTART_COUNT:-0}) is not 0" >&2
fi
if [[ " ${*:3}" == *" --agents"* && " ${*:3}" != *" --lost-nodes"* ]]; then
  flags+=(--lost-nodes unreachable)
fi
rm -f "$report"
pec-restore "$store" "$out" --force -q --json="$report" "${flags[@]}" "${@:3}" >/dev/null
resume=$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["iteration"])' "$report")
if [[ $resume == None ]]; then
  tokens keep 0
  exit 0
fi
tokens keep "$resume"
echo "$out"
