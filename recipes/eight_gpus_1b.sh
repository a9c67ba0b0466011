#!/usr/bin/env bash
# Eight GPUs and a 1B model: DDP, or sharded gradients and optimizer?
# hardware: 8 x a100-40gb
# memory: 25.5 of 39.4 GiB per GPU, 35 GiB of host RAM per node
# time: 22.2 h
# cost: $420
# estimated on 2026-11-28 by the first command below
set -euo pipefail

# 1. Estimate both. The paper recommends DDP if the model fits; sharding makes room for a larger batch.
slm recommend --model slm-1b-hw --tokens 20B --kernels compiled --gpu a100-40gb:8 \
  --strategy ddp fsdp_shard_grad_op

if [[ -z ${TRY:-} ]] && nvidia-smi -L &>/dev/null; then # with GPUs: the real thing
  : "${MODEL:=slm-1b-hw}" "${SEQ_LEN:=1024}" "${BATCH:=8}" "${ACCUMULATE:=8}" "${STEPS:=38147}" "${GPUS:=8}"
  data=(--dataset HuggingFaceFW/fineweb-edu:sample-100BT --tokenizer_name TinyLlama/TinyLlama_v1.1)
  : "${KERNELS:=compiled}"
  measured=(ddp fsdp_shard_grad_op)
else # without GPUs, or with TRY=1: two steps of a tiny model on two CPU processes
  : "${MODEL:=slm-1m}" "${SEQ_LEN:=64}" "${BATCH:=2}" "${ACCUMULATE:=1}" "${STEPS:=2}" "${GPUS:=2}"
  data=(--dataset synthetic)
  : "${KERNELS:=fused}"
  measured=(fsdp_shard_grad_op)
fi
: "${STRATEGY:=ddp}" # or fsdp_shard_grad_op, if step 2 finds it faster on your machine
flags=(--model "$MODEL" --seq_len "$SEQ_LEN" --per_device_train_batch_size "$BATCH"
  --gradient_accumulation_steps "$ACCUMULATE" --kernels "$KERNELS")

# 2. Measure both. Rows that share a rank (=) are a tie: then choose ddp, which is simpler.
slm compare --strategy "${measured[@]}" --num_processes "$GPUS" "${flags[@]}" \
  --max_steps $((STEPS < 33 ? STEPS : 33)) --output_dir runs/check

# 3. Train with one of them. Port 0 means any free port.
# Runs `accelerate launch --config_file .../accel_configs/$STRATEGY.yaml -m slm_toolkit.train ...`.
slm train --strategy "$STRATEGY" --num_processes "$GPUS" --main_process_port 0 \
  "${flags[@]}" "${data[@]}" --max_steps "$STEPS" --warmup_steps $((STEPS / 50)) \
  --eval_steps 1000 --save_steps 1000 --run_name eight-gpus-1b
