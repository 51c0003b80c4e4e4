#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs scripts/slurm/train.sbatch with stand-ins for Slurm, torchrun, the hooks and our commands, and compares the exit code,
# the messages and the calls.
set -euo pipefail

script=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)/scripts/slurm/train.sbatch
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
export LOG=$work/log TMPDIR=$work/tmp PATH=$work/bin:$PATH
mkdir bin hooks tmp
failures=0

# Options of srun are those before the first word without a dash.
cat >bin/srun <<'END'
#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
[[ $1 != true ]] || exit "${NODE_LOST:-0}"
SLURM_NODEID=0 exec "$@"
END
cat >bin/scontrol <<'END'
#!/usr/bin/env bash
case $1 in
  show) echo n1 ;;
  *) echo "scontrol $*" >>"$LOG" ;;
esac
END
cat >bin/torchrun <<'END'
#!/usr/bin/env bash
while [[ $1 != --no_python ]]; do
  [[ $1 != --nproc-per-node* && $1 != --master-port* ]] || echo "torchrun $1 on $PET_NODE_RANK" >>"$LOG"
  shift
done
code=0
"${@:2}" || code=$?
[[ $code -eq 0 ]] || exit 1
END
# A tag with a file `broken` is incomplete.
cat >bin/ucp-load <<'END'
#!/usr/bin/env bash
[[ ! -e $1/broken ]] || { echo "ucp-load: error: $1: 1 file is missing" >&2 && exit 4; }
END
cat >bin/moe-replace <<'END'
#!/usr/bin/env bash
echo "moe-replace $*" >>"$LOG"
while [[ $1 != -o ]]; do shift; done
echo plan >"$2"
END
cat >bin/pec-save <<'END'
#!/usr/bin/env bash
[[ -e ${2#unix:}.runs ]]
END
cat >hooks/restore-hook.sh <<'END'
#!/usr/bin/env bash
echo "restore-hook $*" >>"$LOG"
[[ ${RESTORE_CODE:-0} -eq 0 ]] || exit "$RESTORE_CODE"
echo "${!#}"
END
cat >hooks/pec-restore-hook.sh <<'END'
#!/usr/bin/env bash
echo "pec-restore-hook $* with $PEC_TOKENS" >>"$LOG"
printf '{\n  "bytes_written": 77,\n  "iteration": %s,\n' "${ITERATION:-null}" >"$PEC_REPORT"
[[ -z ${ITERATION:-} ]] || echo "$2"
END
cat >hooks/pec-agent.sh <<'END'
#!/usr/bin/env bash
echo "pec-agent ${*:1:1} ${*:3}" | sed "s#--json=.*/#--json=#" >>"$LOG"
case $1 in
  run)
    for word; do [[ $word != --json=* ]] || printf '{\n  "bytes_written": 99,\n' >"${word#--json=}"; done
    [[ -z ${AGENT_FAILS:-} ]] || exit 7
    touch "$2.runs"
    while [[ -e $2.runs ]]; do sleep 0.05; done
    ;;
  stop) rm "$2.runs" && exit "${STOP_CODE:-0}" ;;
esac
END
cat >hooks/pec-save-hook.sh <<'END'
#!/usr/bin/env bash
echo "pec-save-hook ${*:2}" >>"$LOG"
END
# The trainer: saves STEP into the checkpoint, and ends with CODE.
cat >trainer <<'END'
#!/usr/bin/env bash
echo "trainer $*" >>"$LOG"
if [[ -n ${SIGNAL:-} ]]; then
  python3 -c 'import os, signal, time
signal.signal(signal.SIGUSR1, lambda *_: os._exit(75))
os.kill(int(os.environ["BATCH"]), signal.SIGUSR1)
os.kill(os.getppid(), signal.SIGUSR1)
if "HANDLES" in os.environ:
    os.kill(os.getpid(), signal.SIGUSR1)
time.sleep(100)' || exit $?
fi
if [[ -n ${STEP:-} ]]; then
  mkdir -p "$TRAIN_CHECKPOINT/$STEP"
  echo "$STEP" >"$TRAIN_CHECKPOINT/latest"
fi
exit "${CODE:-0}"
END
chmod +x bin/* hooks/* trainer

# expect NAME CODE LOG-PATTERN ERR-PATTERN
expect() {
  # shellcheck disable=SC2053  # The patterns are meant as patterns.
  if [[ $code -ne $2 || $(<"$LOG") != $3 || $(<err) != $4 ]]; then
    printf 'FAILED: %s\n  exit code %s, expected %s\n  calls: %s\n' "$1" "$code" "$2" "$(<"$LOG")"
    sed 's/^/  stderr: /' err
    failures=$((failures + 1))
  fi
}
export SLURM_JOB_ID=12 SLURM_JOB_NUM_NODES=1 SLURM_JOB_NODELIST=n1 SLURMD_NODENAME=n1
export TRAIN_HOOKS=$work/hooks TRAIN_CHECKPOINT="$work/my run/ckpt" TRAIN_RANKS_PER_NODE=4
train() {
  code=0
  : >"$LOG"
  bash -c 'export BATCH=$$; exec bash "$@"' job "$script" "$work/trainer" 'two words' >out 2>err </dev/null || code=$?
}
requeued="*scontrol requeue 12"
fresh() {
  rm -rf 'my run' && mkdir 'my run'
}

train
expect "the parent folder is missing" 3 "*exit code 3" "*$work/my run: the folder does not exist*"
fresh
STEP=step1 train
expect "the first start" 0 "*torchrun --nproc-per-node=4 on 0*torchrun --master-port=20012 on 0*trainer two words"$'\n'"scontrol update*" \
  "*job 12, start 1: loaded no checkpoint, ran * s, newest step1, exit code 0"
CODE=1 train
expect "a checkpoint is loaded" 1 "restore-hook --ranks 4 $work/my run/ckpt*trainer two words --load $work/my run/ckpt*" "*exit code 1"
[[ $(grep -c requeue "$LOG") -eq 0 ]] || { echo "FAILED: a failed training is requeued" && failures=$((failures + 1)); }
CODE=1 NODE_LOST=1 train
expect "a node does not answer" 75 "$requeued" "*a node does not answer, job 12 goes back into the queue*"
CODE=75 train
expect "exit code 75" 75 "$requeued" "*stopped with exit code 75, job 12*"
CODE=75 SLURM_ARRAY_JOB_ID=40 SLURM_ARRAY_TASK_ID=3 train
expect "a task of a job array is requeued alone" 75 "*scontrol update jobid=40_3 *scontrol requeue 40_3" "*"
SIGNAL=1 HANDLES=1 train
expect "USR1, and the ranks stop" 75 "$requeued" "*USR1 received*stopped with exit code 75*"
SIGNAL=1 TRAIN_STOP_SECONDS=1 train
expect "USR1, and the ranks are ended" 75 "$requeued" "*USR1 received*stopped by USR1, job 12*"
CODE=75 SLURM_RESTART_COUNT=2 TRAIN_MAX_RESTARTS=2 train
expect "restarts have a limit" 75 "*exit code 75" "*after 2 restarts (max_restarts)*"
SLURM_RESTART_COUNT=3 TRAIN_MAX_RESTARTS=2 train
expect "also those that Slurm makes" 75 "restore-hook*exit code 75" "*3 restarts (max_restarts)*"
RESTORE_CODE=75 train
expect "a stopped conversion" 75 "$requeued" "*the conversion was stopped*"
RESTORE_CODE=9 train
expect "a failed conversion" 9 "restore-hook*exit code 9" "*"

fresh
STEP=step1 train
for restart in 1 2; do
  CODE=75 SLURM_RESTART_COUNT=$restart TRAIN_MAX_STALLED=2 train
  expect "restart $restart from the same checkpoint" 75 "$requeued" "*goes back*"
done
CODE=75 SLURM_RESTART_COUNT=3 TRAIN_MAX_STALLED=2 train
expect "no progress" 75 "restore-hook*exit code 75" "*2 starts in a row saved nothing newer than step1 (max_stalled)*"
STEP=step2 train
CODE=75 SLURM_RESTART_COUNT=1 TRAIN_MAX_STALLED=2 train
expect "progress resets the count" 75 "$requeued" "*loaded step2*"

mkdir 'my run/ckpt/step3'
touch 'my run/ckpt/step3/broken'
echo step3 >'my run/ckpt/latest'
train
expect "an incomplete checkpoint" 0 "*--load*" "*step3 is not complete: loading step2*"
[[ $(<'my run/ckpt/latest') == step2 ]] || { echo "FAILED: latest is $(<'my run/ckpt/latest')" && failures=$((failures + 1)); }
touch 'my run/ckpt/step1/broken' 'my run/ckpt/step2/broken'
train
expect "no complete checkpoint" 4 "*exit code 4" "*1 file is missing*no complete checkpoint*"
rm -rf 'my run/ckpt'
train
expect "checkpoints that were there are missing" 3 "*exit code 3" "*the previous start loaded step2: is the file system mounted*"
fresh
SLURM_RESTART_COUNT=1 train
expect "a restart without its file" 3 "*exit code 3" "*ckpt.train: does not exist, but this is restart 1*"

cat >settings <<END
store='$work/my run/store'
tokens='$work/my run/tokens'
plan='$work/my run/plan'
agent_flags=(--k 2)
plan_flags=(--cluster 'my cluster')
END
export TRAIN_SETTINGS=settings
STEP=step1 train
expect "partial checkpoints, the first start" 0 \
  "pec-restore-hook $work/my run/store $work/my run/ckpt.restored with $work/my run/tokens*pec-agent run $work/my run/ckpt $work/my run/store --tokens $work/my run/tokens --k 2 --json=agent.json -q*trainer two words"$'\n'"pec-agent stop*" \
  "*loaded no checkpoint, *newest step1, agent wrote 99 bytes into $work/my run/store, exit code 0"
echo 1 >'my run/tokens'
ITERATION=7 train
expect "partial checkpoints, restored" 0 "*moe-replace $work/my run/tokens --cluster my cluster -o $work/my run/plan.new --force -q*--load $work/my run/ckpt.restored*" \
  "*loaded iteration7 (77 bytes converted in * s)*"
[[ $(<'my run/plan') == plan ]] || { echo "FAILED: no plan" && failures=$((failures + 1)); }
STOP_CODE=7 train
expect "the agent's last save fails" 7 "*" "*the agent ended with exit code 7*"
AGENT_FAILS=1 train
expect "the agent does not start" 7 "*exit code 7" "*the agent ended with exit code 7*"
CODE=75 ITERATION=7 train
expect "the agent saves before the requeue" 75 "*pec-agent stop*scontrol requeue 12" "*"
echo 'agent=none' >>settings
STEP=step1 train
expect "without an agent, and the store is empty" 0 \
  "*restore-hook --ranks 4 $work/my run/ckpt*trainer two words --load $work/my run/ckpt"$'\n'"pec-save-hook $work/my run/ckpt $work/my run/store --tokens $work/my run/tokens --k 2*" "*"
run_code=0
bash "$script" 2>err || run_code=$?
[[ $run_code -eq 2 ]] || { echo "FAILED: no command: $run_code" && failures=$((failures + 1)); }
if compgen -G "$TMPDIR/*" >/dev/null || compgen -G "my run/*.stopped*" >/dev/null; then
  echo "FAILED: files remain" && failures=$((failures + 1))
fi

[[ $failures -eq 0 ]]
