#!/usr/bin/env bash
# How do I train a 2B model on two nodes without InfiniBand?
# hardware: 16 x a100-40gb in 2 nodes
# memory: 11.0 of 39.4 GiB per GPU, 68 GiB of host RAM per node
# time: 58.2 h
# cost: $2,205
# estimated on 2026-11-28 by the first command below
set -euo pipefail

# 1. A full shard would gather every parameter over 25 Gbit/s, twice per step. A hybrid shard gathers within a
#    node and sends only gradients between nodes; ds_zeropp (hpZ) gathers between nodes once.
slm recommend --model slm-2b-hw --tokens 40B --kernels compiled --gpu a100-40gb:16 --network 25 \
  --strategy fsdp_hybrid_shard ds_zeropp fsdp_full_shard

if [[ -z ${TRY:-} ]] && nvidia-smi -L &>/dev/null; then # with GPUs: the real thing
  : "${MODEL:=slm-2b-hw}" "${SEQ_LEN:=1024}" "${BATCH:=32}" "${STEPS:=76294}"
  : "${NODES:=2}" "${GPUS_PER_NODE:=8}" "${NODE_RANK:?0 on the first node, 1 on the next}"
  : "${HEAD_NODE:?address of the first node}" "${RUNS:=/shared/runs}" # a folder that both nodes share
  data=(--dataset HuggingFaceFW/fineweb-edu:sample-100BT --tokenizer_name TinyLlama/TinyLlama_v1.1)
  : "${KERNELS:=compiled}"
else # without GPUs, or with TRY=1: two steps of a tiny model on four CPU processes of one node
  : "${MODEL:=slm-1m}" "${SEQ_LEN:=64}" "${BATCH:=2}" "${STEPS:=2}"
  : "${NODES:=1}" "${GPUS_PER_NODE:=4}" "${NODE_RANK:=0}" "${HEAD_NODE:=127.0.0.1}" "${RUNS:=runs}"
  data=(--dataset synthetic)
  : "${KERNELS:=fused}"
fi
: "${STRATEGY:=fsdp_hybrid_shard}" "${PORT:=29500}"
export NCCL_IB_DISABLE=1 # if the nodes use another interface than the first: NCCL_SOCKET_IFNAME=eth1

# 2. Run it on each node: HEAD_NODE=10.0.0.1 NODE_RANK=0 bash two_nodes_2b.sh. The nodes connect before they
#    start, and report a node that is missing or has other settings. Each node keeps one copy of the state.
slm train --strategy "$STRATEGY" --num_machines "$NODES" --machine_rank "$NODE_RANK" \
  --main_process_ip "$HEAD_NODE" --main_process_port "$PORT" --num_processes $((NODES * GPUS_PER_NODE)) \
  --model "$MODEL" --seq_len "$SEQ_LEN" \
  --per_device_train_batch_size "$BATCH" --gradient_checkpointing full \
  --kernels "$KERNELS" "${data[@]}" --max_steps "$STEPS" --warmup_steps $((STEPS / 50)) \
  --eval_steps 1000 --save_steps 1000 --output_dir "$RUNS" --run_name two-nodes-2b
