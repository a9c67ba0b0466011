#!/usr/bin/env bash
# How do I fine-tune a 1.7B model on chats with one card?
# hardware: 1 x rtx-4090
# memory: 7.0 of 23.5 GiB per GPU, 7 GiB of host RAM per node
# time: 2.5 h
# cost: $1.85
# estimated on 2026-11-28 by the first command below
set -euo pipefail

# 1. LoRA freezes the weights and trains small added matrices: only these have an optimizer state.
#    The estimate is for padded batches: it leaves out what --packing multipack (below) saves, and its mask.
slm estimate --model smollm2-1.7b --peft lora --gpu rtx-4090 --num_gpus 1 --strategy single --seq_len 2048 \
  --per_device_train_batch_size 8 --gradient_accumulation_steps 4 --gradient_checkpointing full \
  --kernels fused --max_steps 1000

if [[ -z ${TRY:-} ]] && nvidia-smi -L &>/dev/null; then # with a GPU: the real thing
  : "${MODEL:=HuggingFaceTB/SmolLM2-1.7B-Instruct}" "${SEQ_LEN:=2048}" "${BATCH:=8}" "${ACCUMULATE:=4}"
  : "${STEPS:=1000}"
  data=(--dataset HuggingFaceTB/smoltalk:all) # or your own .jsonl with rows as below
else # without a GPU, or with TRY=1: two steps of a tiny model, trained and saved first
  python -m slm_toolkit.train --model slm-1m --max_steps 2 --run_name base --save_final_model true
  : "${MODEL:=runs/base/model}" "${SEQ_LEN:=128}" "${BATCH:=2}" "${ACCUMULATE:=1}" "${STEPS:=2}"
  turns='{"role": "user", "content": "What is & and nothing?"}, {"role": "assistant", "content": "It is &."}'
  seq 200 | sed "s/.*/{\"messages\": [$turns]}/" >chats.jsonl
  data=(--dataset chats.jsonl)
fi

# 2. Adapters on all linear layers, not only on attention, with ten times the learning rate of full
#    fine-tuning. The loss is on answers only; packed chats stay whole and do not attend to each other.
#    Needs `pip install peft`.
# Runs `accelerate launch --config_file .../accel_configs/single.yaml -m slm_toolkit.train ...`.
slm train --strategy single --model "$MODEL" "${data[@]}" \
  --peft lora --lora_r 16 --lora_alpha 32 --lora_target_modules all-linear \
  --dataset_format messages --loss_on answers --packing multipack --seq_len "$SEQ_LEN" \
  --per_device_train_batch_size "$BATCH" --gradient_accumulation_steps "$ACCUMULATE" \
  --gradient_checkpointing full --kernels fused --learning_rate 2e-4 \
  --weight_decay 0 --max_steps "$STEPS" --warmup_steps $((STEPS / 20)) --eval_steps 200 --run_name lora

# 3. The adapter, for peft. Its `merge_and_unload()` adds the adapter to the weights, for all other tools.
ls runs/lora/model
