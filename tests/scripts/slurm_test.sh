#!/usr/bin/env bash
# Runs the Slurm examples with stand-ins for Slurm and for our commands, and looks at the exit code,
# the output and what the commands were asked to do.
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
failures=0

mkdir bin
export PATH=$work/bin:$PATH
# The launcher: LAUNCHER_CODE in place of the command's own failure, as real ones do.
cat >bin/srun <<'EOF'
#!/usr/bin/env bash
[[ $1 == --mpi=pmix ]] || exit 99
shift
"$@" || exit "${LAUNCHER_CODE:-$?}"
EOF
cat >bin/scontrol <<'EOF'
#!/usr/bin/env bash
echo "scontrol $*" >>"$LOG"
EOF
# ucp-load SRC OUT ...: ends with LOAD_CODE, and leaves what the real one does.
cat >bin/ucp-load <<'EOF'
#!/usr/bin/env bash
echo "ucp-load $*" >>"$LOG"
out=$2
for word; do
  [[ $word == --json=* && -z ${NO_REPORT:-} ]] && echo "{\"exit_code\": $LOAD_CODE}" >"${word#--json=}"
done
case $LOAD_CODE in
  0)
    rm -rf "$out".partial-* && mkdir -p "$out"
    echo "{\"source\": {\"fingerprint\": \"${FINGERPRINT:-f0}\"}}" >"$out/shardwright.json"
    ;;
  75) mkdir -p "$out.partial-a" ;;
esac
exit "$LOAD_CODE"
EOF
cat >bin/ucp-extract <<'EOF'
#!/usr/bin/env bash
[[ $2 == --list && $3 == --json ]] || exit 99
[[ -d $1 ]] || exit 3
layout='{"zero": 1, "dp": 4, "tp": 2, "pp": 2, "ep": 1, "dtype": "bfloat16"}'
echo "{\"exit_code\": 0, \"result\": {\"kind\": \"${KIND:-deepspeed}\", \"layout\": $layout, \"fingerprint\": \"${FINGERPRINT:-f0}\"}}"
EOF
chmod +x bin/*

# expect NAME CODE STDOUT-PATTERN LOG-PATTERN: judges the run that left $code, out and $LOG.
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
asked="ucp-load src out --target dp=48,zero=3 --format deepspeed --threads 8 --json=out.report.json"

convert
expect "a conversion ends well" 0 "*out is complete" "$asked"
rm -rf out
LOAD_CODE=75 convert
expect "a stopped conversion is requeued" 75 "*back into the queue" "$asked"$'\n'"scontrol requeue 12"
LOAD_CODE=75 LAUNCHER_CODE=1 convert
expect "the report outranks the launcher; it resumes" 75 "*" "$asked --resume"$'\n'"scontrol requeue 12"
convert
expect "the resumed conversion ends well" 0 "*out is complete" "$asked --resume"
LOAD_CODE=6 LAUNCHER_CODE=1 convert
expect "another failure is final" 6 "" "$asked"
LOAD_CODE=0 NO_REPORT=1 convert
expect "without a report the launcher's word counts" 0 "*complete" "$asked"
LOAD_CODE=137 NO_REPORT=1 convert
expect "killed ranks leave no report" 137 "" "$asked"
mkdir -p out.partial-a
LOAD_CODE=5 LAUNCHER_CODE=1 convert
expect "what a stopped run left is of other files: once more, anew" 5 "" "$asked --resume"$'\n'"$asked"
rmdir out.partial-a
LOAD_CODE=5 LAUNCHER_CODE=1 convert
expect "a mismatch of a run that is not resumed is final" 5 "" "$asked"
rm -rf out
run bash "$scripts/convert.sbatch" src out/ 'dp_shard=48' dcp
expect "a name with a slash, another format" 0 "*complete" "${asked/dp=48,zero=3 --format deepspeed/dp_shard=48 --format dcp}"
run bash "$scripts/convert.sbatch" src out
expect "arguments are counted" 2 "" ""

mkdir ckpt
hook
expect "as many ranks as before: nothing to do" 0 "ckpt" ""
SLURM_NTASKS=10 hook
expect "ranks that do not divide" 10 "" ""
KIND=dcp hook
expect "a checkpoint of another format" 9 "" ""
export SLURM_NTASKS=24
asked="ucp-load ckpt ckpt.dp6 --target dp=6 --format deepspeed --json=ckpt.dp6.report.json"
LOAD_CODE=75 LAUNCHER_CODE=1 hook
expect "stopped" 75 "" "$asked"
hook
expect "resumed and converted" 0 "ckpt.dp6" "$asked --resume"
hook
expect "the conversion is there already" 0 "ckpt.dp6" ""
FINGERPRINT=f1 hook
expect "the conversion that is there is of another checkpoint" 6 "" ""
rm -rf ckpt.dp6
mkdir ckpt.dp6.partial-a
LOAD_CODE=5 LAUNCHER_CODE=1 hook
expect "what a stopped conversion left is of other files" 5 "" "$asked --resume"$'\n'"$asked"
rmdir ckpt.dp6.partial-a
echo step8 >ckpt/latest
hook
expect "a later step is converted again" 0 "ckpt.step8.dp6" "${asked//ckpt.dp6/ckpt.step8.dp6}"
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

# The stand-in says what the real command says: the demo checkpoint was saved by two ranks.
if [[ -n $built ]]; then
  cp -r "$tests/data/demo" ckpt
  ln -sf "$built/ucp-extract" bin/ucp-extract
  SLURM_NTASKS=2 hook
  expect "a real listing, as many ranks as before" 0 "ckpt" ""
  SLURM_NTASKS=6 hook
  expect "a real listing, other ranks" 0 "ckpt.global_step5.dp6" \
    "ucp-load ckpt ckpt.global_step5.dp6 --target dp=6 --format deepspeed --json=ckpt.global_step5.dp6.report.json"

  # A real resident load under a stand-in for srun, and a trainer that fails once: it asks the load in place of mapping it.
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
  resident() { run bash "$scripts/resident.sbatch" "$@"; }
  export TMPDIR=$work
  resident ckpt zero=1,dp=2 3 ./trainer 2
  expect "the second try of a trainer ends well" 0 $'ready\nready' $'try of 2\ntry of 2'
  resident ckpt zero=1,dp=2 2 ./trainer 7
  expect "all tries of a trainer fail" 1 $'ready\nready' $'try of 7\ntry of 7'
  resident nowhere zero=1,dp=2 9 ./slow
  expect "a load that fails is heard of" 3 "" ""
  resident ckpt zero=1,dp=2
  expect "arguments of a resident load are counted" 2 "" ""
  if compgen -G "$work/tmp.*" >/dev/null; then
    echo "FAILED: a resident load leaves a folder"
    failures=$((failures + 1))
  fi
fi

[[ $failures -eq 0 ]]
