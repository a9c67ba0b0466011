"""What a recorder costs: steps of a loop with and without `slm_toolkit.recorder`, in turn, in one process.

    python bench/recorder_overhead.py [--rounds 20] [--steps 20]

A round is a few steps with the recorder and as many without. Printed: the mean ratio of their median step
times with its 95 % interval, and the seconds that a step of the recorder's own code takes alone.
"""

import argparse
import sys
import tempfile
import time
from statistics import NormalDist, mean, median, stdev

import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

from slm_toolkit.recorder import Recorder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=20, help="timed steps of each half of a round")
    arguments = parser.parse_args()
    sys.argv = [__file__]
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    config = LlamaConfig(
        hidden_size=320,
        intermediate_size=864,
        num_hidden_layers=8,
        num_attention_heads=5,
        vocab_size=8192,
        max_position_embeddings=128,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    tokens = torch.randint(8192, (4, 128), device=accelerator.device)

    def step(recorder: Recorder | None) -> float:
        started = time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if recorder is not None:
            recorder.after_step(loss)
        if accelerator.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    with tempfile.TemporaryDirectory() as folder:
        ratios, plain, own = [], [], []
        for number in range(arguments.rounds):
            halves = {}
            for is_recorded in (True, False) if number % 2 else (False, True):
                recorder = Recorder(accelerator, model, optimizer, output_dir=folder) if is_recorded else None
                warm_up = 2  # the first step is probed
                halves[is_recorded] = [step(recorder) for _ in range(warm_up + arguments.steps)][warm_up:]
                if recorder is not None:
                    own.append(_seconds_alone(recorder))
                    recorder.stop()
            ratios.append(median(halves[True]) / median(halves[False]))
            plain.append(median(halves[False]))
    half = NormalDist().inv_cdf(0.975) * stdev(ratios) / len(ratios) ** 0.5
    print(f"a step without a recorder: {median(plain) * 1e3:.1f} ms")
    print(f"with it: {mean(ratios) - 1:+.2%} ± {half:.2%} ({len(ratios)} rounds of {arguments.steps} steps)")
    print(f"its own code alone: {median(own) * 1e6:.0f} µs, {median(own) / median(plain):.2%} of a step")


def _seconds_alone(recorder: Recorder) -> float:
    loss = torch.zeros(())
    seconds = []
    for _ in range(50):
        started = time.perf_counter()
        recorder.note_loss(loss)
        recorder.end_step(loss)
        seconds.append(time.perf_counter() - started)
    return median(seconds)


if __name__ == "__main__":
    main()
