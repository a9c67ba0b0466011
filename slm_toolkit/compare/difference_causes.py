"""Why a run computed something else than its reference, as far as their records show it."""

from slm_toolkit.numerics import differences, numerics_from
from slm_toolkit.record import RunRecord


def cause_of(record: RunRecord, reference: RunRecord) -> str | None:
    """A sentence without its full stop; None where the records show no cause."""
    ran, expected = numerics_from(record.numerics), numerics_from(reference.numerics)
    found = []
    if _weights_differ(record, reference):
        found.append("the weights before step 1 differ")
    elif record.weights_fingerprint is None and _draws_other_weights(record):
        found.append("zero3_init_flag drew other random weights in that older run (--force: run it anew)")
    if ran is None or expected is None:
        return found[0] if found else None
    same_ranks = len(ran.batch_hashes or []) == len(expected.batch_hashes or [])
    if same_ranks and ran.batch_hashes != expected.batch_hashes:
        found.append("the batches of step 1 differ")
    if _asked_alike(record, reference):
        other = [each for each in differences(ran, expected) if each.field != "batch_hashes"]
        found += map(str, other)
    return "; ".join(found) or None


def _weights_differ(record: RunRecord, reference: RunRecord) -> bool:
    pair = (record.weights_fingerprint, reference.weights_fingerprint)
    return None not in pair and pair[0] != pair[1]


def _draws_other_weights(record: RunRecord) -> bool:
    """Random weights in pieces, of a record from before those were drawn as under every other strategy."""
    path = record.model.get("path")
    is_random = path is None or str(path).endswith(".json")
    section = (record.asked.get("accelerate_config") or {}).get("deepspeed_config") or {}
    in_pieces = str(section.get("zero3_init_flag", True)).lower() == "true"  # accelerate's default
    return is_random and record.zero_stage == 3 and in_pieces


def _asked_alike(record: RunRecord, reference: RunRecord) -> bool:
    """Whether other numerics are the strategy's doing: no flag asked for them."""
    one, other = record.asked["config"], reference.asked["config"]
    return one == other and record.world_size == reference.world_size
