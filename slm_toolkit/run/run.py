"""What set-up hands to the loop and its observers."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch.distributed import ProcessGroup
from torch.utils.data import DataLoader

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.model.model_spec import ModelSpec
from slm_toolkit.record.run_record import RunRecord
from slm_toolkit.run.checkpoint.checkpoint import CheckpointWriter
from slm_toolkit.run.checkpoint.start import Checkpoint
from slm_toolkit.run.data.data import Data
from slm_toolkit.run.first_loss import CheckedForward
from slm_toolkit.run.model.loss_recorder import RecordedLoss
from slm_toolkit.run.observe.allocations import AllocationTrace
from slm_toolkit.run.observe.machine_load import GpuBefore
from slm_toolkit.run.peers.launch_info import Launch
from slm_toolkit.strategy.strategy import sequences_per_step


@dataclass
class Run:
    """A run while it is set up, and from its first step on. `run/setup.py` fills the fields with defaults."""

    config: RunConfig
    spec: ModelSpec
    launch: Launch
    run_dir: Path
    record: RunRecord
    "before the first step"
    gpu_before: GpuBefore

    accelerator: Accelerator | None = None
    control_group: ProcessGroup | None = None
    "for values that ranks exchange while their GPUs work"
    checkpoint: Checkpoint | None = None
    "the checkpoint that the run resumes from"
    data: Data | None = None
    "None in a rehearsal on fake tensors"
    model: Any = None
    "from `accelerate.prepare` on wrapped by the engine"

    optimizer: Any = None
    loss_recorder: RecordedLoss | None = None
    forward: CheckedForward | None = None
    loader: DataLoader | None = None
    "None in a rehearsal on fake tensors"
    eval_loaders: dict[str, DataLoader] = field(default_factory=dict)
    "by held-out set; empty without --eval_steps"
    checkpoint_writer: CheckpointWriter | None = None
    "None without --save_steps"
    trace: AllocationTrace | None = None
    "only if allocations are traced; already includes the engine's allocations in `accelerate.prepare`"
    num_steps: int = 0

    def note(self, **facts: Any) -> None:
        """Add facts to the record."""
        self.record = replace(self.record, **facts)

    @property
    def sequences_per_step(self) -> int:
        return sequences_per_step(self.config, self.launch.strategy, self.launch.num_processes)

    @property
    def num_micro_steps(self) -> int:
        """Per optimizer step, as the engine counts them: in `stock`, a DeepSpeed JSON overrides the flag."""
        return self.accelerator.gradient_accumulation_steps
