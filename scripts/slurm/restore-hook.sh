#!/usr/bin/env bash
# For a job script that may restart on another number of ranks. Prints the checkpoint folder that
# this run can load: CHECKPOINT itself when it was saved by as many ranks as the job has now,
# otherwise a conversion of it with the data parallelism that fits, made if it is not there yet.
# Tensor and pipeline parallelism stay as they were.
#   checkpoint=$(scripts/slurm/restore-hook.sh /scratch/run7/checkpoints) || exit
#   srun python train.py --load "$checkpoint"
# Exit codes: those of ucp-load; 10 when the ranks are no multiple of tensor times pipeline
# parallelism; 75 when it was stopped (run it again to carry on).
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
layout = json.load(sys.stdin)["result"]["layout"]
print(layout["tp"] * layout["pp"], layout["dp"])' <<<"$listing")
read -r model_ranks copies <<<"$layout"

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
if [[ -f $checkpoint/latest ]]; then
  step=.$(<"$checkpoint/latest")
fi
out=$checkpoint$step.dp$dp
report=$out.report.json
# The folder has this name only once it is complete.
if [[ ! -d $out ]]; then
  resume=()
  if compgen -G "$out.partial-*" >/dev/null; then
    resume=(--resume)
  fi
  rm -f "$report"
  code=0
  srun --mpi=pmix ucp-load "$checkpoint" "$out" --target "dp=$dp" --format deepspeed \
    --json="$report" "${resume[@]}" >&2 || code=$?
  # A launcher may put its own exit code in place of ours: what the report says counts.
  if [[ $code -ne 0 && -s $report ]]; then
    said=$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["exit_code"])' "$report")
    [[ $said -eq 0 ]] || code=$said
  fi
  [[ $code -eq 0 ]] || exit "$code"
fi
echo "$out"
