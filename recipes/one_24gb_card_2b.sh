#!/usr/bin/env bash
# How do I train a 2B model on one 24 GB card?
# hardware: 1 x rtx-4090
# memory: 19.0 of 23.5 GiB per GPU, 8 GiB of host RAM per node
# time: 33.3 h
# cost: $24.61
# estimated on 2026-11-28 by the first command below
set -euo pipefail

# 1. With fp32 master weights the training state alone is 31 GiB: gradient checkpointing, which only saves
#    activations, is not enough. A state in bf16 takes half, and checkpointing makes room for a batch.
slm recommend --model slm-2b-hw --tokens 1B --kernels compiled --gpu rtx-4090:1 --strategy single \
  --numerics aligned pure_bf16 --gradient_checkpointing full --per_device_train_batch_size 16
# Or offload: master weights and AdamW move to the host. Only step 2 measures how fast that is.
slm estimate --model slm-2b-hw --gpu rtx-4090 --num_gpus 1 --strategy single ds_zero2_offload \
  --gradient_checkpointing full --kernels compiled --per_device_train_batch_size 16

if [[ -z ${TRY:-} ]] && nvidia-smi -L &>/dev/null; then # with a GPU: the real thing
  : "${MODEL:=slm-2b-hw}" "${SEQ_LEN:=1024}" "${BATCH:=16}" "${ACCUMULATE:=32}" "${STEPS:=1908}"
  data=(--dataset HuggingFaceFW/fineweb-edu:sample-10BT --tokenizer_name TinyLlama/TinyLlama_v1.1)
  : "${KERNELS:=compiled}"
  measured=(bf16 offload)
else # without a GPU, or with TRY=1: two steps of a tiny model
  : "${MODEL:=slm-1m}" "${SEQ_LEN:=64}" "${BATCH:=2}" "${ACCUMULATE:=2}" "${STEPS:=2}"
  data=(--dataset synthetic)
  : "${KERNELS:=fused}"
  measured=(offload)
fi
declare -A ways=([bf16]="--strategy single --numerics pure_bf16"
  [offload]="--strategy ds_zero2_offload")
# With offload small weight updates are not lost to rounding. It is slower.
: "${WAY:=bf16}"
flags=(--model "$MODEL" --seq_len "$SEQ_LEN" --per_device_train_batch_size "$BATCH"
  --gradient_accumulation_steps "$ACCUMULATE" --gradient_checkpointing full --kernels "$KERNELS")

# 2. Measure the speed of each.
for way in "${measured[@]}"; do
  read -ra own <<<"${ways[$way]}"
  slm compare "${own[@]}" --num_processes 1 "${flags[@]}" \
    --max_steps $((STEPS < 4 ? STEPS : 4)) --output_dir runs/check
done

# 3. Train.
read -ra own <<<"${ways[$WAY]}"
slm train "${own[@]}" --num_processes 1 \
  "${flags[@]}" "${data[@]}" --max_steps "$STEPS" \
  --warmup_steps $((STEPS / 50)) --eval_steps 200 --save_steps 200 --run_name one-24gb-card-2b
