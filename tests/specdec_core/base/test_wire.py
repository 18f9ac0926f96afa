"""Messages arrive whole, and it is known when nobody sends any more."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from specdec_core.base.wire import LinkLost, Wire, WireListener, connect


@pytest.fixture
def ends() -> Iterator[tuple[Wire, Wire]]:
    """Both ends of a wire, the listener's first."""
    listener = WireListener("127.0.0.1")
    found: list[Wire] = []
    arguments = "127.0.0.1", listener.port, listener.key
    thread = threading.Thread(target=lambda: found.append(connect(*arguments)))
    thread.start()
    here = listener.accept(10)
    thread.join()
    listener.close()
    assert here is not None
    yield here, found[0]
    for wire in (here, *found):
        wire.close()


def test_messages_come_whole_and_in_order(ends: tuple[Wire, Wire]) -> None:
    """Also those that a socket cannot hold, and several at once."""
    here, there = ends
    large = bytes(range(256)) * (1 << 14)
    sender = threading.Thread(target=lambda: [there.send(m) for m in (1, large, "last")])
    sender.start()
    found: list[object] = []
    while len(found) < 3:
        found += here.receive(10)
    sender.join()
    assert found == [1, large, "last"]
    assert here.receive() == []


def test_what_was_said_is_heard_before_the_end_is(ends: tuple[Wire, Wire]) -> None:
    here, there = ends
    there.send("goodbye")
    there.close()
    assert here.receive(10) == ["goodbye"]
    with pytest.raises(LinkLost):
        here.receive(10)


def test_another_key_opens_nothing() -> None:
    listener = WireListener("127.0.0.1")
    refused: list[LinkLost] = []

    def guess() -> None:
        try:
            connect("127.0.0.1", listener.port, b"guessed")
        except LinkLost as error:
            refused.append(error)

    thread = threading.Thread(target=guess)
    thread.start()
    assert listener.accept(10) is None
    thread.join()
    listener.close()
    assert refused
