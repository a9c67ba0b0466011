#!/usr/bin/env bash
# What if the training state fits neither the GPU nor the host's RAM?
# hardware: 1 x rtx-4090
# memory: 14.4 of 23.5 GiB per GPU, 25 GiB of host RAM per node
# time: - (it depends on the disk: the first steps tell)
# cost: - (that time at the price of the card)
# estimated on 2026-11-28 by the first command below
set -euo pipefail

# 1. A 7B model on one card: with its state on an NVMe disk, and in host RAM, which is faster if it fits.
slm estimate --model slm-7b --gpu rtx-4090 --num_gpus 1 --strategy ds_zero3_nvme \
  --per_device_train_batch_size 32 --gradient_checkpointing full --kernels fused
slm estimate --model slm-7b --gpu rtx-4090 --num_gpus 1 --strategy ds_zero3_offload \
  --per_device_train_batch_size 32 --gradient_checkpointing full --kernels fused

if [[ -z ${TRY:-} ]] && nvidia-smi -L &>/dev/null; then # with a GPU: the real thing
  # 18 bytes per parameter on a local disk; a large batch, because every step reads and writes all of them
  : "${MODEL:=slm-7b}" "${SEQ_LEN:=1024}" "${BATCH:=32}" "${STEPS:=1000}" "${GPUS:=1}"
  : "${NVME:=/mnt/nvme/slm}" "${DISK_GB:=130}"
  data=(--dataset HuggingFaceFW/fineweb-edu:sample-10BT --tokenizer_name TinyLlama/TinyLlama_v1.1)
else # without a GPU, or with TRY=1: two steps of a tiny model
  : "${MODEL:=slm-1m}" "${SEQ_LEN:=64}" "${BATCH:=2}" "${STEPS:=2}" "${GPUS:=1}"
  : "${NVME:=$PWD/nvme}" "${DISK_GB:=1}"
  data=(--dataset synthetic)
fi

# 2. It needs libaio, and space on the disk. The first use compiles a kernel for some minutes.
[[ -e /usr/include/libaio.h ]] || { echo "apt-get install libaio-dev" >&2; exit 1; }
mkdir -p "$NVME"
free_gb=$(df --output=avail -B1G "$NVME" | tail -1)
((free_gb >= DISK_GB)) || { echo "$NVME has $free_gb GB left, $DISK_GB are needed" >&2; exit 1; }

# 3. The JSON names the disk; its aio settings are a start, DeepSpeed's `ds_io` finds better ones.
mine=$NVME/configs
[[ -d $mine ]] || slm configs --copy "$mine" >/dev/null
sed -i "s#/tmp/slm_toolkit_nvme#$NVME#" "$mine/ds_configs/zero3_nvme.json"
sed -i "s#: ds_configs/#: $mine/ds_configs/#" "$mine/accel_configs/ds_zero3_nvme.yaml"

# 4. Train. Check the seconds of the first steps before you leave it alone.
slm train --strategy "$mine/accel_configs/ds_zero3_nvme.yaml" --num_processes "$GPUS" \
  --main_process_port 0 --model "$MODEL" \
  --seq_len "$SEQ_LEN" --per_device_train_batch_size "$BATCH" --gradient_checkpointing full \
  --kernels fused "${data[@]}" --max_steps "$STEPS" --run_name nvme-offload
