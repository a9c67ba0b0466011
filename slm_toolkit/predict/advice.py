"""What is wrong or unwise in a model and its configuration on given GPUs, and what mending it gives."""

from collections.abc import Iterator
from dataclasses import dataclass

from slm_toolkit.config import RunConfig
from slm_toolkit.groups import fit_groups
from slm_toolkit.hardware import Gpu
from slm_toolkit.models import ModelSpec
from slm_toolkit.predict.as_launched import config_as_launched, strategy_as_launched
from slm_toolkit.predict.bottleneck import (
    WORTH_SAYING,
    aligned_sibling,
    describe_alignment,
    hw_sibling,
    levers,
    misaligned_widths,
)
from slm_toolkit.predict.deepspeed_estimator import ESTIMATOR_VERSION, deepspeed_needs
from slm_toolkit.predict.estimate import Estimate, estimate, largest_batch
from slm_toolkit.predict.host_memory import placement_of
from slm_toolkit.predict.site import Site
from slm_toolkit.strategy import Strategy

TOPICS = ("alignment", "memory", "network", "strategy", "kernels")
_MOST_LEVERS = 3


@dataclass(frozen=True)
class Setting:
    """A configuration on certain GPUs."""

    spec: ModelSpec
    config: RunConfig
    strategy: Strategy
    gpu: Gpu
    num_gpus: int
    gpus_per_node: int
    site: Site
    software: str = "2026"

    def estimate(self, spec: ModelSpec | None = None, config: RunConfig | None = None) -> Estimate:
        """Of this setting, or of another model or configuration in its place."""
        per_node = min(self.num_gpus, self.gpus_per_node)
        fitted = fit_groups(self.strategy, num_ranks=self.num_gpus, ranks_per_node=per_node)
        strategy = strategy_as_launched(fitted)
        return estimate(
            spec or self.spec,
            strategy,
            placement_of(fitted),
            config_as_launched(config or self.config, strategy),
            num_gpus=self.num_gpus,
            gpus_per_node=per_node,
            gpu=self.gpu,
            deepspeed_needs=deepspeed_needs,
            deepspeed_version=ESTIMATOR_VERSION,
            software=self.software,
            site=self.site,
        )


@dataclass(frozen=True)
class Finding:
    """One thing to know, as a sentence."""

    topic: str
    "one of TOPICS"
    severity: str
    "wrong: does not run or wastes most of what is paid; unwise; or could be faster"
    gpu: str | None
    strategy: str | None
    sentence: str
    speedup: float | None
    "tokens/s after the change over before"


@dataclass(frozen=True)
class AlignmentGain:
    """What widths that tensor cores like give on one GPU type."""

    gpu: str
    sibling: str
    "the model, and what is other in it"
    speedup: float


def alignment_gain(setting: Setting) -> AlignmentGain | None:
    """Against the preset's hardware-friendly sibling, else the same shape rounded; None where all is well.

    Tokens per second of both; the siblings' parameters differ by up to 11 % (slm-100m), which is in it.
    """
    spec = setting.spec
    if not misaligned_widths(spec):
        return None
    sibling = hw_sibling(spec) or aligned_sibling(spec)
    before, after = setting.estimate(), setting.estimate(sibling)
    if before.tokens_per_second is None or after.tokens_per_second is None:
        return None
    changed = describe_alignment(spec, sibling)
    name = f"{sibling.name} ({changed})" if sibling.name != spec.name else changed
    return AlignmentGain(setting.gpu.name, name, after.tokens_per_second / before.tokens_per_second)


def findings(settings: list[Setting]) -> list[Finding]:
    """Of all settings, the gravest first; alignment and kernels are of each GPU's fastest one that fits."""
    found = [finding for setting in settings for check in (_memory, _network) for finding in check(setting)]
    found += [
        finding for setting in _fastest(settings) for finding in (*_alignment(setting), *_kernels(setting))
    ]
    found += _strategies(settings)
    severities = ("wrong", "unwise", "could be faster")
    gravity = lambda f: (severities.index(f.severity), TOPICS.index(f.topic), -(f.speedup or 0))  # noqa: E731
    return sorted(dict.fromkeys(found), key=gravity)


def _fastest(settings: list[Setting]) -> list[Setting]:
    by_gpu: dict[str, list[tuple[float, Setting]]] = {}
    for setting in settings:
        row = setting.estimate()
        rate = (row.tokens_per_second or 0.0) if row.fits else -1.0
        by_gpu.setdefault(setting.gpu.name, []).append((rate, setting))
    return [max(rated, key=lambda pair: pair[0])[1] for rated in by_gpu.values()]


def _alignment(setting: Setting) -> Iterator[Finding]:
    gain = alignment_gain(setting)
    if gain is None or gain.speedup < WORTH_SAYING:
        return
    widths = ", ".join(f"{name} {width}" for name, width in misaligned_widths(setting.spec).items())
    yield Finding(
        "alignment",
        "wrong" if gain.speedup >= 1.25 else "unwise",
        gain.gpu,
        None,
        f"{setting.spec.name}: {widths} is no multiple of 8, so tensor cores can't load it at once: "
        f"{gain.sibling} should train {gain.speedup:.2f} times as fast on {gain.gpu}",
        gain.speedup,
    )


def _memory(setting: Setting) -> Iterator[Finding]:
    row = setting.estimate()
    where = (setting.gpu.name, setting.strategy.name)
    if row.verdict is None:
        yield Finding(
            *("memory", "unwise", where[0], None),
            f"the memory of {where[0]} is not known: nobody can say whether {row.model} fits",
            None,
        )
    size = row.peak_allocated_bytes / 2**30
    if row.verdict == "does not fit":

        def of_batch(config: RunConfig) -> Estimate:
            return setting.estimate(config=config)

        most = largest_batch(of_batch, setting.config).per_device_train_batch_size
        remedy = f"--per_device_train_batch_size {most} does" if most else "not even one sequence does"
        yield Finding(
            *("memory", "wrong", *where),
            f"{size:.1f} GiB don't fit on {where[0]} under {where[1]}: {remedy}",
            None,
        )
    elif row.verdict == "tight":
        yield Finding(
            *("memory", "unwise", *where),
            f"{size:.1f} GiB fit tightly on {where[0]} under {where[1]}: it may run out, or thrash",
            None,
        )


def _network(setting: Setting) -> Iterator[Finding]:
    row = setting.estimate()
    where = (setting.gpu.name, setting.strategy.name)
    if setting.strategy.offloads:
        yield Finding(
            *("kernels", "unwise", None, where[1]),
            f"{where[1]} offloads: there is no closed form for its time, memory alone was looked at",
            None,
        )
    elif row.tokens_per_second is None:
        yield Finding(
            *("network", "unwise", where[0], None),
            f"the network between nodes of {where[0]} is not known: --inter_node_gbps gives it",
            None,
        )
    needed, has = row.inter_node_gbps_needed, row.inter_node_gbps
    if needed and has and needed > has:
        share = row.parts_seconds["communication"] / row.step_seconds
        yield Finding(
            *("network", "wrong" if share > 0.5 else "unwise", *where),
            f"{where[1]} on {row.num_gpus} {where[0]} needs {needed:,.0f} Gbit/s between nodes to hide its "
            f"communication, there are {has:,.0f}: {share:.0%} of a step is waiting",
            None,
        )


def _kernels(setting: Setting) -> Iterator[Finding]:
    row = setting.estimate()
    if not row.fits or row.tokens_per_second is None:
        return
    found = levers(lambda spec, config: setting.estimate(spec, config), setting.spec, setting.config)
    for lever in [lever for lever in found if lever.change.startswith("--")][:_MOST_LEVERS]:
        bound = row.bottleneck.replace("_", " ")
        yield Finding(
            *("kernels", "could be faster", setting.gpu.name, setting.strategy.name),
            f"bound by {bound} on {setting.gpu.name} under {setting.strategy.name}: {lever.change} should "
            f"give {lever.speedup - 1:+.0%} tokens/s",
            lever.speedup,
        )


def _strategies(settings: list[Setting]) -> Iterator[Finding]:
    """Where another of the strategies asked about fits too and is clearly faster."""
    groups: dict[tuple, list[Estimate]] = {}
    for setting in settings:
        row = setting.estimate()
        if row.fits and row.tokens_per_second is not None:
            groups.setdefault((setting.gpu.name, setting.num_gpus, setting.spec.name), []).append(
                (setting, row)
            )
    for group in groups.values():
        best = max((row for _, row in group), key=lambda row: row.tokens_per_second)
        for _, row in group:
            speedup = best.tokens_per_second / row.tokens_per_second
            if speedup >= 1.05:
                yield Finding(
                    *("strategy", "could be faster", row.gpu, row.strategy),
                    f"{best.strategy} fits on {row.num_gpus} x {row.gpu} too and gives {speedup - 1:+.0%} "
                    f"tokens/s over {row.strategy}",
                    speedup,
                )
