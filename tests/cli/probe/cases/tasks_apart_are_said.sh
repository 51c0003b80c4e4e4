# SPDX-License-Identifier: Apache-2.0
SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=4 probe in out -q --fail 6
echo "$?"
