"""Whether another strategy would do better: none where the model fits whole, one of those asked about."""

import dataclasses
from collections.abc import Iterator

from slm_toolkit.finding import Finding
from slm_toolkit.predict.estimate import Estimate
from slm_toolkit.predict.setting import Setting
from slm_toolkit.strategy import Strategy, find_strategy

_CLEARLY_FASTER = 1.05
"less is within what estimates can tell apart"
_MUCH_FASTER = 1.15


def needless(setting: Setting) -> Iterator[Finding]:
    """Sharding and offload of what fits without: the paper's answer is DDP first."""
    if setting.strategy.offloads:
        row = dataclasses.replace(setting, strategy=without_offload(setting.strategy)).estimate()
        if row.verdict == "fits":
            yield Finding(
                name="offload-of-what-fits",
                topic="strategy",
                severity="unwise",
                gpu=setting.gpu.name,
                strategy=setting.strategy.name,
                sentence=f"{setting.spec.name} fits on {setting.num_gpus} x {setting.gpu.name} without "
                f"offload: {row.peak_allocated_bytes / 2**30:.1f} GiB under {setting.strategy.name}",
                why="offload sends the training state over the host's bus at every step",
                change="the same strategy without its offload keys",
            )
        return
    if not setting.strategy.sharded_parts:
        return
    plain = find_strategy("ddp" if setting.num_gpus > 1 else "single")
    before, after = setting.estimate(), dataclasses.replace(setting, strategy=plain).estimate()
    if after.verdict != "fits" or before.tokens_per_second is None or after.tokens_per_second is None:
        return
    speedup = after.tokens_per_second / before.tokens_per_second
    if speedup >= _CLEARLY_FASTER:
        yield Finding(
            name="sharding-of-what-fits",
            topic="strategy",
            severity="unwise" if speedup >= _MUCH_FASTER else "could be faster",
            gpu=setting.gpu.name,
            strategy=setting.strategy.name,
            sentence=f"{setting.spec.name} fits on each of {setting.num_gpus} x {setting.gpu.name} whole: "
            f"{plain.name} gives {speedup - 1:+.0%} tokens/s over {setting.strategy.name}",
            why="shards are sent around to be put together again; the paper's advice for small models is DDP "
            "while it fits",
            change=f"--strategy {plain.name}",
            speedup=speedup,
        )


def without_offload(strategy: Strategy) -> Strategy:
    """The strategy with everything on the GPU."""
    config = dict(strategy.accelerate_config or {})
    if strategy.engine == "deepspeed":
        zero = dict(strategy.deepspeed_config["zero_optimization"])
        for part in ("offload_optimizer", "offload_param"):
            zero.pop(part, None)
        deepspeed = {**strategy.deepspeed_config, "zero_optimization": zero}
        return dataclasses.replace(strategy, deepspeed_config=deepspeed)
    config["fsdp_config"] = {**config["fsdp_config"], "fsdp_offload_params": False}
    return dataclasses.replace(strategy, accelerate_config=config)


def faster_strategies(settings: list[Setting]) -> Iterator[Finding]:
    """Where another of the strategies asked about fits too and is clearly faster; plain ones: `needless`."""
    groups: dict[tuple, list[Estimate]] = {}
    for setting in settings:
        row = setting.estimate()
        if row.fits and row.tokens_per_second is not None:
            groups.setdefault((setting.gpu.name, setting.num_gpus, setting.spec.name), []).append(row)
    for group in groups.values():
        best = max(group, key=lambda row: row.tokens_per_second)
        for row in group:
            speedup = best.tokens_per_second / row.tokens_per_second
            if speedup >= _CLEARLY_FASTER and best.strategy not in ("ddp", "single"):
                yield Finding(
                    name="faster-strategy",
                    topic="strategy",
                    severity="could be faster",
                    gpu=row.gpu,
                    strategy=row.strategy,
                    sentence=f"{best.strategy} fits on {row.num_gpus} x {row.gpu} too and gives "
                    f"{speedup - 1:+.0%} tokens/s over {row.strategy}",
                    why="it sends less, or computes less again",
                    change=f"--strategy {best.strategy}",
                    speedup=speedup,
                )
