"""Rank 0's connections to the first rank of every other machine."""

import socket

import pytest

from slm_toolkit.launch.rendezvous import Peer, listen
from slm_toolkit.run.peers import machines
from slm_toolkit.run.peers.machines import _accept

HERE = "127.0.0.1"


def test_of_all_connections_those_of_machines_that_came_are_kept() -> None:
    with listen(HERE, 0) as listener:
        place = listener.getsockname()
        with (
            socket.create_connection(place) as second,
            socket.create_connection(place) as stranger,
            socket.create_connection(place) as first,
        ):
            peers = [Peer(1, *first.getsockname(), HERE), Peer(2, *second.getsockname(), HERE)]
            links = {link.rank: link for link in _accept(listener, peers)}
            assert stranger.recv(1) == b""
            for rank, there in ((1, first), (2, second)):
                there.sendall(b"hello")
                assert links[rank].socket.recv(5) == b"hello"
                assert links[rank].address == HERE


def test_a_connection_from_another_address_than_the_machine_has_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machines, "_ACCEPT_SECONDS", 0.1)
    with (
        listen(HERE, 0) as listener,
        socket.create_connection(listener.getsockname()),
        pytest.raises(ValueError, match=r"no connection from 10\.0\.0\.2:1234, .*\nhint: .*NAT"),
    ):
        _accept(listener, [Peer(1, "10.0.0.2", 1234, HERE)])
