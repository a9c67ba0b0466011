"""Turns: who gets the next one, and that a run that ends, dies or keeps its turn stops nobody."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from slm_toolkit.base import turns as module
from slm_toolkit.base.turns import TURNS_VARIABLE, OwnTurns, Turns, own_turns


def runner(turns: Turns, name: str) -> OwnTurns:
    return OwnTurns(*json.loads(turns.environment(name)[TURNS_VARIABLE]))


@contextmanager
def waiting(run: OwnTurns) -> Iterator[threading.Event]:
    """Ask for a turn in a thread; the event tells that it came."""
    came = threading.Event()

    def wait() -> None:
        run.wait(None)
        came.set()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    yield came
    thread.join(10)
    assert not thread.is_alive()


def test_each_run_computes_alone_and_in_turn() -> None:
    turns, order = Turns("abc"), []
    lock = threading.Lock()

    def train(name: str) -> None:
        run = runner(turns, name)
        for _ in range(5):
            assert run.wait(0.04) == 3  # 0.12 s of steps of 0.04 s
            assert lock.acquire(blocking=False)  # nobody else computes
            order.append(name)
            lock.release()
        turns.ended(name)

    with turns.given():
        threads = [threading.Thread(target=train, args=(name,)) for name in "abc"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
    rounds = [set(order[first : first + 3]) for first in range(0, 15, 3)]
    assert rounds == [{"a", "b", "c"}] * 5


def test_nobody_starts_before_all_have_asked_or_ended() -> None:
    turns = Turns("abc")
    with turns.given():
        run = runner(turns, "a")
        with waiting(run) as came:
            assert not came.wait(0.3)
            turns.ended("b")  # it failed before its first step
            assert not came.wait(0.3)
            other = runner(turns, "c")
            with waiting(other) as next_came:
                assert came.wait(5)
                assert not next_came.wait(0.3)
                run._socket.close()
                assert not next_came.wait(0.3)  # its processes are still ending
                turns.ended("a")
                assert next_came.wait(5)


def test_a_run_that_dies_in_its_turn_leaves_it_to_the_next() -> None:
    turns = Turns("ab")
    with turns.given():
        dying, other = runner(turns, "a"), runner(turns, "b")
        with waiting(dying) as came, waiting(other) as next_came:
            assert came.wait(5) or next_came.wait(5)
            run, name, second = (dying, "a", next_came) if came.is_set() else (other, "b", came)
            run._socket.shutdown(socket.SHUT_RDWR)  # as when the kernel closes a killed process's socket
            turns.ended(name)
            assert second.wait(5)


def test_a_run_that_keeps_its_turn_stops_the_others_no_longer_than_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MOST_SECONDS", 0.2)
    turns = Turns("ab")
    with turns.given():
        saving, other = runner(turns, "a"), runner(turns, "b")
        with waiting(saving), waiting(other):
            pass  # both came, though neither ended its turn


def test_a_run_goes_on_when_the_comparison_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Turns("ab")
    with turns.given():
        run = runner(turns, "a")
        monkeypatch.setenv(TURNS_VARIABLE, turns.environment("b")[TURNS_VARIABLE])
    assert run.wait(0.1) > 10**6  # steps
    assert own_turns() is None
    monkeypatch.delenv(TURNS_VARIABLE)
    assert own_turns() is None
