#!/usr/bin/env bash
# How do I compare strategies and train a model on a Slurm cluster?
# hardware: 16 x a100-40gb in 2 nodes
# memory: 22.9 of 39.4 GiB per GPU, 35 GiB of host RAM per node
# time: 11.0 h
# cost: $418
# estimated on 2026-11-28 by the first command below
set -euo pipefail

# 1. Time and cost of the training in step 3, on two nodes, by strategy; without waiting in the queue.
slm recommend --model slm-1b-hw --tokens 20B --kernels compiled --gpu a100-40gb:16 \
  --strategy ddp fsdp_hybrid_shard fsdp_shard_grad_op

if [[ -z ${TRY:-} ]] && sinfo -h &>/dev/null; then # on a login node: the real thing
  : "${MODEL:=slm-1b-hw}" "${SEQ_LEN:=1024}" "${BATCH:=16}" "${ACCUMULATE:=2}" "${STEPS:=38147}"
  : "${CHECK_STEPS:=33}" "${NODES:=2}" "${GPUS_PER_NODE:=8}" "${OPTIONS:=--partition=gpu --time=2-00:00:00}"
  strategies=(fsdp_shard_grad_op fsdp_hybrid_shard ddp)
  data=(--dataset HuggingFaceFW/fineweb-edu:sample-100BT --tokenizer_name TinyLlama/TinyLlama_v1.1)
  : "${KERNELS:=compiled}"
else # elsewhere, or with TRY=1: two steps of a tiny model on two CPU processes
  : "${MODEL:=slm-1m}" "${SEQ_LEN:=64}" "${BATCH:=2}" "${ACCUMULATE:=1}" "${STEPS:=2}"
  : "${CHECK_STEPS:=2}" "${NODES:=1}" "${GPUS_PER_NODE:=0}" "${OPTIONS:=--time=10}"
  strategies=(ddp)
  data=(--dataset synthetic)
  : "${KERNELS:=fused}"
fi
: "${STRATEGY:=${strategies[0]}}" # choose the one that step 2 finds fastest
# Without Slurm, this only writes the scripts and prints how to submit them.
sinfo -h &>/dev/null && submit=() || submit=(--dry_run)
slurm=(--launcher slurm --num_nodes "$NODES" --gpus_per_node "$GPUS_PER_NODE" "--slurm_options=$OPTIONS")
flags=(--model "$MODEL" --seq_len "$SEQ_LEN" --per_device_train_batch_size "$BATCH"
  --kernels "$KERNELS")

# 2. One job per strategy; the command waits for the jobs and prints the table. If you lose the connection,
#    run the same command: it finds its jobs again. All nodes must share the folder.
slm compare "${slurm[@]}" "${submit[@]}" --strategy "${strategies[@]}" "${flags[@]}" \
  --max_steps "$CHECK_STEPS" --output_dir runs/check

# 3. The training itself, as another job.
slm compare "${slurm[@]}" "${submit[@]}" --strategy "$STRATEGY" "${flags[@]}" "${data[@]}" \
  --gradient_accumulation_steps "$ACCUMULATE" --max_steps "$STEPS" --warmup_steps $((STEPS / 50)) \
  --eval_steps 1000 --save_steps 1000 --save_final_model true --timeout 172800 --output_dir runs/train
