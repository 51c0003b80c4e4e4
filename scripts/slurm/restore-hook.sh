#!/usr/bin/env bash
# For a job script of DeepSpeed that may restart on another number of ranks. Prints the checkpoint folder that
# this run can load: CHECKPOINT itself when it was saved by as many ranks as the job has now,
# otherwise a conversion of it with the data parallelism that fits, made if it is not there yet.
# Tensor and pipeline parallelism stay as they were. What a trainer keeps beside the tag folder
# (trainer_state.json, scheduler.pt, the tokenizer) comes along.
#   checkpoint=$(scripts/slurm/restore-hook.sh /scratch/run7/checkpoints) || exit
#   srun python train.py --load "$checkpoint"
# Exit codes: those of ucp-load, 9 when CHECKPOINT is not DeepSpeed's; 6 when the conversion that is
# there is of an older checkpoint with the same name; 10 when the ranks are no multiple of tensor
# times pipeline parallelism; 75 when it was stopped (run it again to carry on).
set -euo pipefail

if [[ $# -ne 1 || -z ${SLURM_NTASKS:-} ]]; then
  echo "usage: restore-hook.sh CHECKPOINT (inside a Slurm job)" >&2
  exit 2
fi
checkpoint=${1%/}

# Ranks that train on one copy of the data, and copies, as the checkpoint was saved.
listing=$(ucp-extract "$checkpoint" --list --json) || exit
layout=$(python3 -c '
import json, sys
found = json.load(sys.stdin)["result"]
layout = found["layout"]
if found["kind"] != "deepspeed":
    sys.exit("restore-hook: a checkpoint of " + found["kind"] + ": this hook is for DeepSpeed; see ucp-load --format")
print(layout["tp"] * layout["pp"], layout["dp"], found["fingerprint"])' <<<"$listing") || exit 9
read -r model_ranks copies fingerprint <<<"$layout"

if [[ $SLURM_NTASKS -eq $((model_ranks * copies)) ]]; then
  echo "$checkpoint"
  exit 0
fi
if [[ $((SLURM_NTASKS % model_ranks)) -ne 0 ]]; then
  echo "restore-hook: $SLURM_NTASKS ranks are no multiple of the $model_ranks that hold one copy of the model in $checkpoint" >&2
  exit 10
fi
dp=$((SLURM_NTASKS / model_ranks))

# One conversion for each saved step; training moves `latest` on.
step=
if [[ -e $checkpoint/latest || -L $checkpoint/latest ]]; then
  step=.$(cat "$checkpoint/latest") || exit 3
fi
out=$checkpoint$step.dp$dp
report=$out.report.json
convert() {
  rm -f "$report"
  code=0
  srun --mpi=pmix ucp-load "$checkpoint" "$out" --target "dp=$dp" --format deepspeed \
    --json="$report" "$@" >&2 || code=$?
  # A launcher may put its own exit code in place of ours: what the report says counts.
  if [[ $code -ne 0 && -s $report ]]; then
    said=$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["exit_code"])' "$report")
    [[ $said -eq 0 ]] || code=$said
  fi
}

# The folder has its name only once it is complete. Training may have saved another checkpoint under
# the same name since then.
if [[ -d $out ]]; then
  made_of=$(python3 -c '
import json, sys
print(json.load(open(sys.argv[1]))["source"]["fingerprint"])' "$out/shardwright.json") || exit 4
  if [[ $made_of != "$fingerprint" ]]; then
    echo "restore-hook: $out is not of what $checkpoint holds now: remove it, or load it yourself" >&2
    exit 6
  fi
  echo "$out"
  exit 0
fi
stopped=
for partial in "$out".partial-*; do
  # The pattern itself where nothing fits it.
  [[ ! -e $partial ]] || stopped=1
done
if [[ -n $stopped ]]; then
  convert --resume
  if [[ $code -eq 5 ]]; then
    echo "restore-hook: what a stopped conversion left is of other files: beginning anew" >&2
    convert
  fi
else
  convert
fi
[[ $code -eq 0 ]] || exit "$code"
echo "$out"
