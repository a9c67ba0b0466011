"""Whether runs that should compute the same thing did: their losses, step by step."""

from dataclasses import dataclass

from slm_toolkit.record import RunRecord

NUM_STEPS = 20
RELATIVE_TOLERANCE = {"fp32": 1e-5, "aligned": 3e-3, "stock": 3e-3}
"of each step's loss, by numerics: sums in another order in fp32; bf16 keeps 8 bits of a mantissa"


@dataclass(frozen=True)
class LossAgreement:
    """How far a run's losses lie from a reference's, over the first `num_steps` steps."""

    largest_relative_difference: float
    worst_step: int
    "counted from 1"
    num_steps: int
    tolerance: float

    @property
    def agrees(self) -> bool:
        return self.largest_relative_difference <= self.tolerance


def compare_losses(reference: RunRecord, record: RunRecord, *, num_steps: int = NUM_STEPS) -> LossAgreement:
    """Relative difference at each of the first steps. Raises ValueError where they share no step."""
    pairs = list(zip(reference.losses, record.losses, strict=False))[:num_steps]
    if not pairs:
        raise ValueError(f"{record.run_name} and {reference.run_name} share no step")
    differences = [
        float("inf") if None in (wanted, got) else abs(got - wanted) / abs(wanted) for wanted, got in pairs
    ]
    largest = max(differences)
    tolerance = RELATIVE_TOLERANCE[record.asked["config"]["numerics"]]
    return LossAgreement(largest, differences.index(largest) + 1, len(pairs), tolerance)
