#!/usr/bin/env bash
# Will my training fit in memory, before I rent GPUs?
# hardware: 64 x a100-40gb in 8 nodes (the plan; this runs on any computer)
# memory: 22.6 of 39.4 GiB per GPU, 68 GiB of host RAM per node
# time: - (seconds; nothing is launched on a GPU)
# cost: - (nothing is rented)
# estimated on 2026-11-28 by the first command below
set -euo pipefail

# 1. Estimates, in a fraction of a second: what fits, how much memory is left, the peak; the largest batch.
slm estimate --model slm-2b-hw --gpu a100-40gb --num_gpus 64 --strategy fsdp_shard_grad_op \
  --per_device_train_batch_size 8 --kernels fused
slm estimate --model slm-2b-hw --gpu a100-40gb --num_gpus 8 64 --largest_batch --kernels fused

if [[ -z ${TRY:-} ]]; then # the real thing, on any computer
  : "${MODEL:=slm-2b-hw}" "${SEQ_LEN:=1024}" "${BATCH:=8}"
  strategies=(fsdp_shard_grad_op ds_zero3) ranks=(8 64)
else # TRY=1: smaller
  : "${MODEL:=slm-100m}" "${SEQ_LEN:=1024}" "${BATCH:=8}"
  strategies=(fsdp_shard_grad_op) ranks=(64)
fi

# 2. A rehearsal: one process plays rank 0 of 8 and of 64, with the real script and engine. Without a GPU its
#    tensors take no memory, and every allocation is recorded.
slm compare --rehearse "${ranks[@]}" --model "$MODEL" --strategy "${strategies[@]}" --seq_len "$SEQ_LEN" \
  --per_device_train_batch_size "$BATCH" --kernels fused \
  --output_dir runs/dry # `slm report runs/dry/NAME` shows which modules cause the peak

# 3. Both beside each other in one table. Where they differ, trust the rehearsal.
slm report runs/dry
