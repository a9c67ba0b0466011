#!/usr/bin/env bash
# What if host RAM is too small for one copy of the model per rank?
# hardware: 8 x a100-40gb
# memory: 19.9 of 39.4 GiB per GPU, 68 GiB of host RAM per node
# time: 93.6 h
# cost: $1,773
# estimated on 2026-11-28 by the first command below
set -euo pipefail

# 1. Eight ranks that each build a 2B model in fp32 need the RAM above before they use a GPU, and the kernel
#    kills them (exit code -9). Under ZeRO-3 with zero3_init_flag, only rank 0 builds the whole model.
slm recommend --model slm-2b-hw --tokens 40B --kernels compiled \
  --gpu a100-40gb:8 --strategy ds_zero3

if [[ -z ${TRY:-} ]] && nvidia-smi -L &>/dev/null; then # with GPUs: the real thing
  : "${MODEL:=slm-2b-hw}" "${SEQ_LEN:=1024}" "${BATCH:=8}" "${ACCUMULATE:=8}" "${STEPS:=76294}" "${GPUS:=8}"
  have_gib=$(awk '/MemAvailable/ {print int($2 / 2^20)}' /proc/meminfo) # available RAM
  data=(--dataset HuggingFaceFW/fineweb-edu:sample-100BT --tokenizer_name TinyLlama/TinyLlama_v1.1)
  : "${KERNELS:=compiled}"
else # without GPUs, or with TRY=1: two steps of a tiny model, as if no RAM were available
  : "${MODEL:=slm-1m}" "${SEQ_LEN:=64}" "${BATCH:=2}" "${ACCUMULATE:=1}" "${STEPS:=2}" "${GPUS:=2}"
  have_gib=0
  data=(--dataset synthetic)
  : "${KERNELS:=fused}"
fi
[[ -d accel_configs ]] || slm configs --copy . >/dev/null
sed 's/zero3_init_flag: false/zero3_init_flag: true/' accel_configs/ds_zero3.yaml >in_pieces.yaml

# 2. Does it fit this host? A container may have less than the machine.
limit=$(cat /sys/fs/cgroup/memory.max 2>/dev/null || echo max)
[[ $limit == max ]] || ((limit / 2 ** 30 > have_gib)) || have_gib=$((limit / 2 ** 30))
need_gib() {
  slm estimate --model "$MODEL" --num_gpus "$GPUS" --strategy "$1" --json |
    python -c 'import json, sys; print(-(-json.load(sys.stdin)[0]["host_bytes_per_node"] // 2**30))'
}
strategy=ds_zero3
(($(need_gib ds_zero3) <= have_gib)) || strategy=in_pieces.yaml
echo "GiB of RAM: $have_gib here, $(need_gib ds_zero3) for whole models, $(need_gib in_pieces.yaml) in shards"

# 3. Train. (FSDP's cpu_ram_efficient_loading saves nothing with transformers 5.23: every rank loads it all.)
slm train --strategy "$strategy" --num_processes "$GPUS" --main_process_port 0 \
  --model "$MODEL" --seq_len "$SEQ_LEN" --per_device_train_batch_size "$BATCH" \
  --gradient_accumulation_steps "$ACCUMULATE" --kernels "$KERNELS" \
  "${data[@]}" --max_steps "$STEPS" --warmup_steps $((STEPS / 50)) --save_steps 1000 --run_name little-ram

# 4. The largest RAM of a rank, to plan the next run.
slm report runs/little-ram --json | python -c 'import json, sys
print("largest RAM of a rank in GiB:", json.load(sys.stdin)[0]["peak_rss_bytes"] / 2**30)'
