"""Setting: a configuration on certain GPUs, and what widths that tensor cores like would give it."""

from dataclasses import dataclass

from slm_toolkit.config import RunConfig
from slm_toolkit.groups import fit_groups
from slm_toolkit.hardware import Gpu
from slm_toolkit.models import ModelSpec
from slm_toolkit.predict.as_launched import config_as_launched, strategy_as_launched
from slm_toolkit.predict.bottleneck import aligned_sibling, describe_alignment, hw_sibling, misaligned_widths
from slm_toolkit.predict.deepspeed_estimator import ESTIMATOR_VERSION, deepspeed_needs
from slm_toolkit.predict.estimate import Estimate, estimate
from slm_toolkit.predict.host_memory import placement_of
from slm_toolkit.predict.site import Site
from slm_toolkit.strategy import Strategy


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
class AlignmentGain:
    """What widths that tensor cores like give on one GPU type."""

    gpu: str
    sibling: str
    "the model, and what is other in it"
    speedup: float


def alignment_gain(setting: Setting) -> AlignmentGain | None:
    """Against the preset's hardware-friendly sibling, else the same shape rounded; None where all is well,
    and for weights that are there already.

    Tokens per second of both; the siblings' parameters differ by up to 11 % (slm-100m), which is in it.
    """
    spec = setting.spec
    if not misaligned_widths(spec) or setting.config.peft != "none":
        return None
    sibling = hw_sibling(spec) or aligned_sibling(spec)
    before, after = setting.estimate(), setting.estimate(sibling)
    if before.tokens_per_second is None or after.tokens_per_second is None:
        return None
    changed = describe_alignment(spec, sibling)
    name = f"{sibling.name} ({changed})" if sibling.name != spec.name else changed
    return AlignmentGain(setting.gpu.name, name, after.tokens_per_second / before.tokens_per_second)
