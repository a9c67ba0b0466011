"""Turns: who gets the next one, and that a run that ends, dies or keeps its turn stops nobody."""

import json
import select
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
def asking(turns: Turns, name: str) -> Iterator[socket.socket]:
    """A run's connection that has asked for its first turn."""
    path, _ = json.loads(turns.environment(name)[TURNS_VARIABLE])
    with socket.socket(socket.AF_UNIX) as run:
        run.connect(path)
        run.sendall(json.dumps([name, None]).encode())
        yield run


def has_answer(run: socket.socket, *, seconds: float = 5) -> bool:
    return bool(select.select([run], [], [], seconds)[0])


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
    with turns.given(), asking(turns, "a") as run:
        assert not has_answer(run, seconds=0.3)
        turns.ended("b")  # it failed before its first step
        assert not has_answer(run, seconds=0.3)
        with asking(turns, "c") as other:
            assert has_answer(run)
            run.close()
            assert not has_answer(other, seconds=0.3)  # the processes of the first are still ending
            turns.ended("a")
            assert has_answer(other)


def test_a_run_that_is_launched_again_does_not_keep_the_turn_of_its_first_launch() -> None:
    turns = Turns("ab")
    with turns.given(), asking(turns, "a") as dying, asking(turns, "b") as other:
        assert has_answer(dying) or has_answer(other)
        name, rest = ("a", other) if has_answer(dying, seconds=0) else ("b", dying)
        (dying if name == "a" else other).close()
        turns.environment(name)
        with asking(turns, name) as again:
            assert has_answer(rest)
            assert not has_answer(again, seconds=0.3)


def test_a_run_that_keeps_its_turn_stops_the_others_no_longer_than_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MOST_SECONDS", 0.2)
    turns = Turns("ab")
    with turns.given(), asking(turns, "a") as saving, asking(turns, "b") as other:
        assert has_answer(saving)
        assert has_answer(other)  # though neither ended its turn


def test_a_run_goes_on_when_the_comparison_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Turns("ab")
    with turns.given():
        run = runner(turns, "a")
        monkeypatch.setenv(TURNS_VARIABLE, turns.environment("b")[TURNS_VARIABLE])
    assert run.wait(0.1) > 10**6  # steps
    assert own_turns() is None
    monkeypatch.delenv(TURNS_VARIABLE)
    assert own_turns() is None
