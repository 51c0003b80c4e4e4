#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# For a DeepSpeed job script that may restart on a different number of ranks. Prints the checkpoint folder that this run
# can load: CHECKPOINT itself if it was saved by as many ranks as the job has now, otherwise a conversion of it with the
# data parallelism that fits, which is made if it does not exist yet. Tensor and pipeline parallelism stay as they were,
# unless --target names them. Sibling files of the tag folder (trainer_state.json, scheduler.pt, the tokenizer) are copied.
#   checkpoint=$(scripts/slurm/restore-hook.sh /scratch/run7/checkpoints) || exit
#   srun python train.py --load "$checkpoint"
#   scripts/slurm/restore-hook.sh --ranks 64 --target tp=4,zero=3 /scratch/run7/checkpoints
# --ranks N     ranks of the training, also as RANKS. Otherwise nodes times GPUs per node (SLURM_GPUS_ON_NODE), as for one
#               task on each node with torchrun; without GPUs the tasks of the job (SLURM_NTASKS). The hook prints which.
# --target KEYS keys of ucp-load's --target other than dp, which follows from the ranks
# MPI_TYPE      --mpi of srun, default pmix
# Folders of torch.distributed.checkpoint and universal checkpoints load on any number of ranks: the hook prints them.
# Exit codes: those of ucp-load, 9 when CHECKPOINT is of another trainer; 6 when the conversion that exists is of an older
# checkpoint with the same name; 10 when the ranks are not a multiple of tensor times pipeline parallelism; 75 when it
# was stopped (run it again to resume).
set -euo pipefail

usage() {
  echo "usage: restore-hook.sh [--ranks N] [--target KEYS] CHECKPOINT" >&2
  [[ $# -eq 0 ]] || echo "restore-hook: $1" >&2
  exit 2
}

is_count() {
  [[ $1 =~ ^[1-9][0-9]{0,6}$ ]]
}

ranks=${RANKS:-} from=RANKS target=
while [[ ${1:-} == --* ]]; do
  [[ $# -ge 2 ]] || usage
  case $1 in
    --ranks) ranks=$2 from=--ranks ;;
    --target) target=$2 ;;
    *) usage ;;
  esac
  shift 2
done
[[ $# -eq 1 ]] || usage
[[ ,$target != *,dp=* ]] || usage "--target: dp is not allowed, it follows from the number of ranks; pass --ranks N"
checkpoint=${1%/}

nodes=${SLURM_JOB_NUM_NODES:-${SLURM_NNODES:-}} gpus=${SLURM_GPUS_ON_NODE:-}
if [[ -z $ranks ]] && is_count "$nodes" && is_count "$gpus"; then
  ranks=$((nodes * gpus)) from="$nodes nodes with $gpus GPUs each"
elif [[ -z $ranks ]]; then
  ranks=${SLURM_NTASKS:-} from=SLURM_NTASKS
fi
[[ -n $ranks ]] || usage "unknown number of ranks: pass --ranks N, set RANKS, or run it inside a Slurm job"
is_count "$ranks" || usage "$from: a number of ranks expected, found \"$ranks\""
echo "restore-hook: $ranks ranks, from $from" >&2

# The listing has a line for each member of an object, indented by its depth, and no text in JSON holds a line end.
# value KEY: prints the number or word of KEY in an object with members that are not indented.
value() {
  sed -n "s/^\"$1\": \"\{0,1\}\([a-z0-9_]*\)\"\{0,1\},\{0,1\}\$/\1/p"
}
listing=$(SHARDWRIGHT_MPI=none ucp-extract "$checkpoint" --list --json) || exit
result=$(sed -n '/^  "result": {$/,/^  }/s/^    //p' <<<"$listing")
kind=$(value kind <<<"$result") fingerprint=$(value fingerprint <<<"$result")
case $kind in
  deepspeed) ;;
  dcp | universal)
    echo "$checkpoint"
    exit 0
    ;;
  *)
    echo "restore-hook: $checkpoint has the format ${kind:-unknown}, but this hook is for DeepSpeed; see ucp-load --format" >&2
    exit 9
    ;;
esac
layout=$(sed -n '/^"layout": {$/,/^}/s/^  //p' <<<"$result")
saved_tp=$(value tp <<<"$layout") saved_pp=$(value pp <<<"$layout") copies=$(value dp <<<"$layout")
if ! is_count "$saved_tp" || ! is_count "$saved_pp" || ! is_count "$copies" || [[ -z $fingerprint ]]; then
  echo "restore-hook: ucp-extract --list does not report how many ranks saved $checkpoint" >&2
  exit 9
fi

# Ranks that train on one copy of the data.
tp=$saved_tp pp=$saved_pp
if [[ ,$target =~ ,tp=([^,]*) ]]; then tp=${BASH_REMATCH[1]}; fi
if [[ ,$target =~ ,pp=([^,]*) ]]; then pp=${BASH_REMATCH[1]}; fi
if ! is_count "$tp" || ! is_count "$pp"; then
  usage "--target: numbers expected for tp and pp"
fi
model_ranks=$((tp * pp))
if [[ -z $target && $ranks -eq $((model_ranks * copies)) ]]; then
  echo "$checkpoint"
  exit 0
fi
if [[ $((ranks % model_ranks)) -ne 0 ]]; then
  echo "restore-hook: $ranks ranks are not a multiple of the $model_ranks ranks that hold one copy of the model in $checkpoint" >&2
  exit 10
fi
keys=dp=$((ranks / model_ranks))

# One conversion for each saved step; training moves `latest` on.
step=
if [[ -e $checkpoint/latest || -L $checkpoint/latest ]]; then
  step=.$(cat "$checkpoint/latest") || exit 3
fi
# The layout is part of the name: a job with another one makes its own.
out=$checkpoint$step.${keys/=/}
if [[ -n $target ]]; then
  keys+=,$target
  out+=-${target//[^[:alnum:]]/}
fi
report=$out.report-${SLURM_JOB_ID:-$$}.json

# The folder has its name only once it is complete. Training may have saved another checkpoint under the same name since
# then.
if [[ -d $out ]]; then
  made_of=$(sed -n '/^ "source": {$/,/^ }/s/^  "fingerprint": "\([0-9a-f]*\)",\{0,1\}$/\1/p' "$out/shardwright.json") || exit 4
  if [[ $made_of != "$fingerprint" ]]; then
    echo "restore-hook: $out was converted from a different checkpoint than the one now in $checkpoint: remove it, or load it yourself" >&2
    exit 6
  fi
  echo "$out"
  exit 0
fi

# wait_for_other: returns when the run that has the lock of the output has ended: it removes the lock file, which it updates
# every 20 seconds. Fails if there is no such run.
wait_for_other() {
  local waited=1
  while [[ ! -d $out && -n $(find "$out.lock" -maxdepth 0 -mmin -3 2>/dev/null) ]]; do
    [[ $waited -eq 0 ]] || echo "restore-hook: another job is converting to $out: waiting for it" >&2
    waited=0
    sleep 1
  done
  return "$waited"
}

# convert FLAG...: sets code. A job that continues on another node takes over the lock of the node that failed.
convert() {
  local said
  rm -f "$report"
  code=0
  srun --mpi="${MPI_TYPE:-pmix}" --wait=60 ucp-load "$checkpoint" "$out" --target "$keys" --format deepspeed \
    --json="$report" --take-over "$@" >&2 || code=$?
  # A launcher may replace the command's exit code: the report has the right one.
  said=$(sed -n 's/^  "exit_code": \([0-9]\{1,3\}\),$/\1/p' "$report" 2>/dev/null) || true
  if [[ $code -ne 0 && $said =~ ^[1-9][0-9]*$ ]]; then
    code=$said
  fi
}

stopped=
for partial in "$out".partial-*; do
  # The pattern itself if no file matches it.
  [[ ! -e $partial ]] || stopped=1
done
convert --resume
# Several jobs may need the same conversion: one makes it, and the others use it. The lock may be gone when it is looked at.
for ((try = 0; code == 6 && try < 3; ++try)); do
  if wait_for_other; then
    try=0
  fi
  convert --resume
done
if [[ $code -eq 6 && -n $stopped ]]; then
  echo "restore-hook: the stopped conversion read different files: starting again" >&2
  convert --no-resume
fi
[[ $code -eq 0 ]] || exit "$code"
echo "$out"
