#!/usr/bin/env bash
#SBATCH --job-name=whale
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue
# WHALE over the GPUs of several machines: one task a machine, which starts a rank a GPU. A job that was ended goes on
# when it is submitted again. The checkout must be on a file system that all machines see; RUN is written by machine 0.
#
#   sbatch slurm.sh math --preset paper --seed 0
set -euo pipefail

export NNODES=$SLURM_NNODES MASTER_PORT=$(( 20000 + SLURM_JOB_ID % 20000 ))
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR
cd "$SLURM_SUBMIT_DIR"
NNODES=1 WHALE_RANKS=1 bash run.sh "$@" --help >/dev/null          # the environment, once, before all machines ask for it
exec srun --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" bash -c 'NODE_RANK=$SLURM_NODEID exec bash run.sh "$@"' run.sh "$@"
