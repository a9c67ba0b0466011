#!/usr/bin/env bash
# Do the paper's results hold on my GPUs?
# hardware: 8 x a100-80gb
# memory: 72.9 of 79.2 GiB per GPU, 65 GiB of host RAM per node
# time: 30 min
# cost: $10.80
# estimated on 2026-11-28 by the first command below
set -euo pipefail

# 1. The grid of Ashkboos et al. (arXiv 2410.19456) on a node of eight: models, batches, attention kernels,
#    strategies. Hours and dollars are for 33 steps each, without the time to start the runs.
slm estimate --model slm-100m slm-500m slm-1b slm-2b --numerics pure_bf16 --attn_implementation eager sdpa \
  --strategy ddp fsdp_full_shard fsdp_shard_grad_op --per_device_train_batch_size 8 16 32 64 \
  --kernels plain --gpu a100-80gb --num_gpus 1 2 8 --max_steps 33 >estimated.txt

if [[ -z ${TRY:-} ]] && nvidia-smi -L &>/dev/null; then # with GPUs: the real thing
  models=(slm-100m slm-500m slm-1b slm-2b) batches=(8 16 32 64) attention=(eager sdpa)
  strategies=(ddp fsdp_full_shard fsdp_shard_grad_op) counts=(1 2 8)
  : "${SEQ_LEN:=1024}" "${STEPS:=33}"
  each=(--gpus_per_run) # as many runs at once as the GPUs allow
else # without GPUs, or with TRY=1: two steps of a tiny model on two CPU processes
  models=(slm-1m) batches=(2) attention=(sdpa) strategies=(ddp) counts=(2)
  : "${SEQ_LEN:=64}" "${STEPS:=2}"
  each=(--num_processes)
fi

# 2. Measure. You can stop at any time: the same command continues with the missing runs.
for count in "${counts[@]}"; do
  slm compare "${each[@]}" "$count" --model "${models[@]}" --strategy "${strategies[@]}" \
    --per_device_train_batch_size "${batches[@]}" --attn_implementation "${attention[@]}" \
    --numerics pure_bf16 --kernels plain --seq_len "$SEQ_LEN" --max_steps "$STEPS" --output_dir runs/paper
done

# 3. All runs as an HTML page. In a checkout, `python studies/ashkboos/compare.py runs/paper` prints them next
#    to the paper's figures, and answers its four questions.
slm report runs/paper --export paper.html
