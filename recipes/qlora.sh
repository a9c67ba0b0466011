#!/usr/bin/env bash
# How little memory is enough to fine-tune a 1.5B model?
# hardware: 1 x rtx-4090
# memory: 1.7 of 23.5 GiB per GPU, 7 GiB of host RAM per node
# time: 2.2 h
# cost: $1.61
# estimated on 2026-11-28 by the first command below
set -euo pipefail

# 1. QLoRA: frozen weights in 4 bits, adapters in bf16, recomputed activations, one sequence at a time.
#    The estimate is for padded batches: it leaves out what --packing multipack (below) saves, and its mask.
slm estimate --model qwen2.5-1.5b --peft qlora --gpu rtx-4090 --num_gpus 1 --strategy single --seq_len 1024 \
  --per_device_train_batch_size 1 --gradient_accumulation_steps 32 --gradient_checkpointing full \
  --kernels fused --max_steps 1500

if [[ -z ${TRY:-} ]] && nvidia-smi -L &>/dev/null; then # with a GPU: the real thing
  : "${MODEL:=Qwen/Qwen2.5-1.5B-Instruct}" "${SEQ_LEN:=1024}" "${BATCH:=1}" "${ACCUMULATE:=32}"
  : "${STEPS:=1500}"
  data=(--dataset tatsu-lab/alpaca) # or your own .jsonl with rows as below
else # without a GPU, or with TRY=1: two steps of a tiny model, trained and saved first
  python -m slm_toolkit.train --model slm-1m --max_steps 2 --run_name base --save_final_model true
  : "${MODEL:=runs/base/model}" "${SEQ_LEN:=128}" "${BATCH:=1}" "${ACCUMULATE:=2}" "${STEPS:=2}"
  seq 200 | sed 's/.*/{"instruction": "Double it.", "input": "&", "output": "It is & and &."}/' >alpaca.jsonl
  data=(--dataset alpaca.jsonl)
fi

# 2. Needs `pip install peft bitsandbytes`. On several cards: ddp, ds_zero2 or fsdp_full_shard, but not ZeRO-3
#    (it shards 4-bit weights without their scales).
# Runs `accelerate launch --config_file .../accel_configs/single.yaml -m slm_toolkit.train ...`.
slm train --strategy single --model "$MODEL" "${data[@]}" \
  --peft qlora --lora_r 16 --lora_alpha 32 --lora_target_modules all-linear \
  --dataset_format alpaca --loss_on answers --packing multipack --seq_len "$SEQ_LEN" \
  --per_device_train_batch_size "$BATCH" --gradient_accumulation_steps "$ACCUMULATE" \
  --gradient_checkpointing full --kernels fused --learning_rate 2e-4 \
  --weight_decay 0 --max_steps "$STEPS" --warmup_steps $((STEPS / 20)) --eval_steps 300 --run_name qlora

# 3. The measured memory and time.
slm report runs/qlora
