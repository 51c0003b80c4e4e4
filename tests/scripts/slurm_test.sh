#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the Slurm examples with stand-ins for Slurm and for the commands, and checks the exit code,
# the output and the arguments of the commands.
# Usage: slurm_test.sh [BIN]
#   BIN  folder of the built commands: the hook then also reads a listing of the real ucp-extract
set -euo pipefail

tests=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
scripts=$tests/../scripts/slurm
built=${1:+$(realpath "$1")}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
export LOG=$work/log
# shellcheck disable=SC2016  # The text must reach the scripts as it is.
code_in_text='a[$(touch ran)]'
failures=0

mkdir bin
export PATH=$work/bin:$PATH
# The launcher: LAUNCHER_CODE in place of the command's own failure, as real ones do.
cat >bin/srun <<'EOF'
#!/usr/bin/env bash
[[ $1 == --mpi=pmix ]] || exit 99
shift
while [[ $1 == --* ]]; do
  echo "srun $1" >>"$LOG"
  shift
done
"$@" || exit "${LAUNCHER_CODE:-$?}"
EOF
cat >bin/scontrol <<'EOF'
#!/usr/bin/env bash
echo "scontrol $*" >>"$LOG"
[[ -z ${NO_REQUEUE:-} ]]
EOF
# ucp-load SRC OUT ...: ends with LOAD_CODE, and leaves what the real one does.
cat >bin/ucp-load <<'EOF'
#!/usr/bin/env bash
echo "ucp-load $*" >>"$LOG"
out=$2
for word; do
  [[ $word == --json=* && -z ${NO_REPORT:-} ]] &&
    printf '{\n  "dry_run": false,\n  "exit_code": %s,\n  "status": ""\n}\n' "${SAID:-$LOAD_CODE}" >"${word#--json=}"
done
case $LOAD_CODE in
  0)
    rm -rf "$out".partial-* && mkdir -p "$out"
    printf '{\n "source": {\n  "fingerprint": "%s"\n }\n}\n' "${FINGERPRINT:-f0}" >"$out/shardwright.json"
    ;;
  75)
    mkdir -p "$out.partial-a/.journal"
    [[ -n ${NO_PROGRESS:-} ]] || echo unit >>"$out.partial-a/.journal/0"
    ;;
esac
exit "$LOAD_CODE"
EOF
cat >bin/ucp-extract <<'EOF'
#!/usr/bin/env bash
[[ $2 == --list && $3 == --json ]] || exit 99
[[ -d $1 ]] || exit 3
cat <<JSON
{
  "exit_code": 0,
  "result": {
    "files": [
      {
        "kind": "model",
        "tp": 7
      }
    ],
    "fingerprint": "${FINGERPRINT:-f0}",
    "kind": "${KIND:-deepspeed}",
    "layout": {
      "dp": 4,
      "dtype": "bfloat16",
      "pp": 2,
      "tp": 2,
      "zero": 1
    }
  }
}
JSON
EOF
chmod +x bin/*

# expect NAME CODE STDOUT-PATTERN LOG-PATTERN: checks the run that left $code, out and $LOG.
expect() {
  local name=$1
  # shellcheck disable=SC2053  # The patterns are meant as patterns.
  if [[ $code -ne $2 || $(<out) != $3 || $(<"$LOG") != $4 ]]; then
    printf 'FAILED: %s\n  exit code %s, expected %s\n  stdout: %s\n  asked: %s\n' \
      "$name" "$code" "$2" "$(<out)" "$(<"$LOG")"
    sed 's/^/  stderr: /' err
    failures=$((failures + 1))
  fi
}
run() {
  code=0
  : >"$LOG"
  "$@" >out 2>err </dev/null || code=$?
}
export SLURM_JOB_ID=12 SLURM_NTASKS=16 SLURM_CPUS_PER_TASK=8 LOAD_CODE=0
convert() { run bash "$scripts/convert.sbatch" src out 'dp=48,zero=3'; }
hook() { run "$scripts/restore-hook.sh" ckpt/; }
asked="srun --wait=60"$'\n'"srun --cpus-per-task=8"$'\n'"ucp-load src out --target dp=48,zero=3 --format deepspeed --threads 8 --json=out.report-12.json --take-over"

convert
expect "a conversion ends well" 0 "*out is complete" "$asked --resume"
rm -rf out
LOAD_CODE=75 convert
expect "a stopped conversion is requeued" 75 "*back into the queue" "$asked --resume"$'\n'"scontrol requeue 12"
LOAD_CODE=75 LAUNCHER_CODE=1 SLURM_RESTART_COUNT=1 convert
expect "the report outranks the launcher" 75 "*" "$asked --resume"$'\n'"scontrol requeue 12"
LOAD_CODE=75 SLURM_ARRAY_JOB_ID=40 SLURM_ARRAY_TASK_ID=3 convert
expect "a task of a job array is requeued alone" 75 "*job 40_3 goes back*" "*--json=out.report-40_3.json*scontrol requeue 40_3"
LOAD_CODE=75 NO_REQUEUE=1 convert
expect "a job that may not be requeued" 75 "" "*scontrol requeue 12"
LOAD_CODE=75 SLURM_RESTART_COUNT=20 convert
expect "restarts have a limit" 75 "" "$asked --resume"
LOAD_CODE=75 SLURM_RESTART_COUNT=2 MAX_RESTARTS=2 convert
expect "another limit" 75 "" "$asked --resume"
LOAD_CODE=75 SLURM_RESTART_COUNT=1 NO_PROGRESS=1 convert
expect "a restart that copies nothing is the last" 75 "" "$asked --resume"
LOAD_CODE=75 SLURM_RESTART_COUNT=$code_in_text MAX_RESTARTS=$code_in_text convert
expect "variables are numbers" 75 "*back into the queue" "*scontrol requeue 12"
convert
expect "the resumed conversion ends well" 0 "*out is complete" "$asked --resume"
convert
expect "a requeued complete conversion ends well" 0 "*out is complete" "$asked --resume"
LOAD_CODE=6 LAUNCHER_CODE=1 convert
expect "another failure is final" 6 "" "$asked --resume"
grep -q "exit code 6, report in out.report-12.json" err || { echo "FAILED: the report is not named" && failures=$((failures + 1)); }
LOAD_CODE=1 LAUNCHER_CODE=1 SAID="\"$code_in_text\"" convert
expect "text in a report is no number" 1 "" "$asked --resume"
LOAD_CODE=0 NO_REPORT=1 convert
expect "without a report the launcher's word counts" 0 "*complete" "$asked --resume"
export RETRY_WAIT=0
LOAD_CODE=137 NO_REPORT=1 convert
expect "killed ranks leave no report" 137 "*back into the queue" "$asked --resume"$'\n'"$asked --resume"$'\n'"scontrol requeue 12"
LOAD_CODE=137 NO_REPORT=1 SLURM_RESTART_COUNT=1 NO_PROGRESS=1 convert
expect "ranks that are killed again without progress" 137 "" "$asked --resume"$'\n'"$asked --resume"
if grep -q "report in" err; then
  echo "FAILED: a report is named that does not exist" && failures=$((failures + 1))
fi
rm -rf out
LOAD_CODE=75 convert
LOAD_CODE=6 LAUNCHER_CODE=1 convert
expect "a stopped run of other files: it starts again" 6 "" "$asked --resume"$'\n'"$asked --no-resume"
rm -rf out.partial-a
LOAD_CODE=6 LAUNCHER_CODE=1 convert
expect "a mismatch without a stopped run is final" 6 "" "$asked --resume"
rm -rf out
run bash "$scripts/convert.sbatch" src out/ 'dp_shard=48' dcp
expect "a name with a slash, another format" 0 "*complete" "${asked/dp=48,zero=3 --format deepspeed/dp_shard=48 --format dcp} --resume"
run bash "$scripts/convert.sbatch" src out
expect "arguments are counted" 2 "" ""
if [[ -e ran ]]; then
  echo "FAILED: text was evaluated" && failures=$((failures + 1))
fi

mkdir ckpt
hook
expect "as many ranks as before: nothing to do" 0 "ckpt" ""
SLURM_NTASKS=10 hook
expect "ranks that do not divide" 10 "" ""
KIND=safetensors hook
expect "a checkpoint of another format" 9 "" ""
KIND=dcp hook
expect "a folder that loads on any number of ranks" 0 "ckpt" ""
asked="srun --wait=60"$'\n'"ucp-load ckpt ckpt.dp6 --target dp=6 --format deepspeed --json=ckpt.dp6.report-12.json --take-over"
from() {
  grep -q "^restore-hook: $1\$" err || { echo "FAILED: ranks from $1: $(<err)" && failures=$((failures + 1)); }
}
SLURM_NTASKS=2 SLURM_JOB_NUM_NODES=2 SLURM_GPUS_ON_NODE=8 hook
expect "one task on each node, eight GPUs" 0 "ckpt" ""
from "16 ranks, from 2 nodes with 8 GPUs each"
SLURM_JOB_NUM_NODES=2 hook
expect "nodes without GPUs" 0 "ckpt" ""
from "16 ranks, from SLURM_NTASKS"
RANKS=8 SLURM_JOB_NUM_NODES=2 SLURM_GPUS_ON_NODE=8 hook
expect "ranks by a variable" 0 "ckpt.dp2" $'srun --wait=60\n'"ucp-load ckpt ckpt.dp2 --target dp=2 --format deepspeed*"
from "8 ranks, from RANKS"
rm -rf ckpt.dp2
RANKS=8 run "$scripts/restore-hook.sh" --ranks 16 ckpt
expect "ranks by an option" 0 "ckpt" ""
from "16 ranks, from --ranks"
run "$scripts/restore-hook.sh" --ranks 16 --target tp=4,zero=3 ckpt
expect "other parallel degrees" 0 "ckpt.dp2-tp4zero3" \
  $'srun --wait=60\n'"ucp-load ckpt ckpt.dp2-tp4zero3 --target dp=2,tp=4,zero=3 --format deepspeed --json=ckpt.dp2-tp4zero3.report-12.json --take-over --resume"
rm -rf ckpt.dp2*
for wrong in "$code_in_text" 0 -3 1e3; do
  run "$scripts/restore-hook.sh" --ranks "$wrong" ckpt
  expect "ranks that are no number: $wrong" 2 "" ""
  SLURM_NTASKS=$wrong hook
  expect "tasks that are no number: $wrong" 2 "" ""
done
SLURM_NTASKS='' hook
expect "outside of a job" 2 "" ""
run "$scripts/restore-hook.sh" --target dp=3 ckpt
expect "dp follows from the ranks" 2 "" ""
if [[ -e ran ]]; then
  echo "FAILED: text was evaluated" && failures=$((failures + 1))
fi
export SLURM_NTASKS=24
LOAD_CODE=75 LAUNCHER_CODE=1 hook
expect "stopped" 75 "" "$asked --resume"
hook
expect "resumed and converted" 0 "ckpt.dp6" "$asked --resume"
hook
expect "the conversion is there already" 0 "ckpt.dp6" ""
FINGERPRINT=f1 hook
expect "the conversion that is there is of another checkpoint" 6 "" ""
rm -rf ckpt.dp6
mkdir ckpt.dp6.partial-a
LOAD_CODE=6 LAUNCHER_CODE=1 hook
tries="$asked --resume"$'\n'"$asked --resume"$'\n'"$asked --resume"$'\n'"$asked --resume"
expect "a stopped conversion of other files" 6 "" "$tries"$'\n'"$asked --no-resume"
rmdir ckpt.dp6.partial-a
echo step8 >ckpt/latest
hook
expect "a later step is converted again" 0 "ckpt.step8.dp6" "${asked//ckpt.dp6/ckpt.step8.dp6} --resume"
rm -rf ckpt
hook
expect "a missing checkpoint" 3 "" ""

# Names may hold what a shell takes for patterns.
mkdir 'run[1]*'
out='run[1]*/ckpt'
mkdir "$out" "$out.dp6.partial-a"
run "$scripts/restore-hook.sh" "$out"
expect "a stopped conversion under a name with pattern characters" 0 "run\[1\]\*/ckpt.dp6" "*--resume"
rm -rf "$out".*
mkdir "$out.partial-a"
run bash "$scripts/convert.sbatch" src "$out" 'dp=48,zero=3'
expect "the same, converted by a job" 0 "*complete" "*--resume"
ln -s nowhere "$out/latest"
run "$scripts/restore-hook.sh" "$out"
expect "a latest that cannot be read" 3 "" ""
rm -rf run*

# The stand-in prints the same as the real command: the demo checkpoint was saved by two ranks.
if [[ -n $built ]]; then
  cp -r "$tests/data/demo" ckpt
  ln -sf "$built/ucp-extract" bin/ucp-extract
  SLURM_NTASKS=2 hook
  expect "a real listing, as many ranks as before" 0 "ckpt" ""
  SLURM_NTASKS=6 hook
  expect "a real listing, other ranks" 0 "ckpt.global_step5.dp6" \
    $'srun --wait=60\n'"ucp-load ckpt ckpt.global_step5.dp6 --target dp=6 --format deepspeed --json=ckpt.global_step5.dp6.report-12.json --take-over --resume"

  # A real shared-memory cache under a stand-in for srun, and a trainer that fails once: it queries the cache in place
  # of mapping it.
  cat >bin/srun <<'EOF'
#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
exec "$@"
EOF
  cat >trainer <<'EOF'
#!/usr/bin/env bash
ucp-load status "$2" --wait 60 --quiet | sed -n 's/^state *//p'
echo "try of $1" >>"$LOG"
[[ $(wc -l <"$LOG") -eq $1 ]]
EOF
  printf '#!/usr/bin/env bash\nsleep 2\nexit 1\n' >slow
  chmod +x bin/srun trainer slow
  ln -sf "$built/ucp-load" bin/ucp-load
  cache() { run bash "$scripts/cache.sbatch" "$@"; }
  export TMPDIR=$work
  cache ckpt zero=1,dp=2 3 ./trainer 2
  expect "the second try of a trainer ends well" 0 $'ready\nready' $'try of 2\ntry of 2'
  cache ckpt zero=1,dp=2 2 ./trainer 7
  expect "all tries of a trainer fail" 1 $'ready\nready' $'try of 7\ntry of 7'
  cache nowhere zero=1,dp=2 9 ./slow
  expect "a load that fails is heard of" 3 "" ""
  cache ckpt zero=1,dp=2
  expect "arguments of a cache are counted" 2 "" ""
  if compgen -G "$work/tmp.*" >/dev/null; then
    echo "FAILED: a cache leaves a folder"
    failures=$((failures + 1))
  fi
fi

[[ $failures -eq 0 ]]
