#!/bin/bash
# One run of a comparison as a Slurm job on one or several nodes; each node starts its own `accelerate launch`.
# `slm compare --launcher slurm` replaces the names in double braces. The job gets your shell's environment, such as
# loaded modules, and its working folder, and needs a file system that all nodes share.
#SBATCH --job-name={{run_name}}
#SBATCH --output={{log}}
#SBATCH --nodes={{num_nodes}}
#SBATCH --ntasks-per-node=1
#SBATCH --no-requeue
#SBATCH {{options}}
set -euo pipefail

# Rank 0's node, and a port that depends on the job, so that jobs on one node don't share it. Below 32768, because
# Linux gives ports above that to outgoing connections.
head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((10000 + SLURM_JOB_ID % 20000))

cores=$((SLURM_CPUS_PER_TASK / {{processes_per_node}}))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > 0 ? cores : 1))}
export TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1

# srun ignores the job's --cpus-per-task since Slurm 22.05, so it is repeated. SLURM_NODEID is 0 on the first node.
srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" bash -c \
    'exec "$0" -m accelerate.commands.launch --machine_rank "$SLURM_NODEID" "$@"' {{python}} \
    --config_file {{config_file}} \
    --num_machines {{num_nodes}} --num_processes {{num_processes}} \
    --main_process_ip "$head_node" --main_process_port "$port" \
    -m slm_toolkit.train {{train_flags}}
