"""The requests that a trace of allocations becomes, for the model of PyTorch's allocator."""

from slm_toolkit.run.observe.allocations import Allocation, Event, requests_of, reserved_bytes

MIB = 2**20


def made(num_mib: int, phase: str, stream: int = 0) -> Allocation:
    return Allocation(num_mib * MIB, phase, "", "aten.empty", stream)


def event(allocation: Allocation, num_mib: int, phase: str) -> Event:
    return Event(allocation, num_mib * MIB, phase, "")


def test_the_setup_is_what_lives_when_the_first_step_begins() -> None:
    whole, shard, activation = made(800, "setup"), made(100, "setup"), made(30, "forward", stream=1)
    events = [
        event(whole, 800, "setup"),
        event(shard, 100, "setup"),
        event(whole, -800, "setup"),
        event(activation, 30, "forward"),
        event(activation, -30, "backward"),
    ]
    assert list(requests_of(events)) == [("a", 0, 100 * MIB, 0), ("a", 1, 30 * MIB, 1), ("f", 1)]
    assert reserved_bytes(events) == 130 * MIB


def test_a_resized_storage_is_copied_before_it_is_freed() -> None:
    gathered = made(40, "forward")
    events = [event(gathered, 40, "forward"), event(gathered, 20, "forward"), event(gathered, -60, "forward")]
    assert list(requests_of(events)) == [
        *(("a", 0, 40 * MIB, 0), ("a", 1, 60 * MIB, 0), ("f", 0)),
        ("f", 1),
    ]


def test_temporary_storages_of_the_first_update_are_left_out() -> None:
    moment, shape, later = made(20, "optimizer"), made(900, "optimizer"), made(10, "optimizer")
    events = [
        event(moment, 20, "optimizer"),
        event(shape, 900, "optimizer"),
        event(shape, -900, "optimizer"),
        event(made(2, "between"), 2, "between"),
        event(later, 10, "optimizer"),
        event(later, -10, "optimizer"),
    ]
    assert [request[2] // MIB for request in requests_of(events) if request[0] == "a"] == [20, 2, 10]
