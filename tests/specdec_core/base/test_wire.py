"""Messages arrive whole and unchanged, from processes that know the key and from no other."""

import socket
import threading
import time
from contextlib import ExitStack, closing, suppress

import pytest

from specdec_core.base import wire as module
from specdec_core.base.wire import LinkLost, WireListener, connect

LIMIT = 8 << 20


@pytest.fixture
def listener():
    with closing(WireListener("127.0.0.1", limit=LIMIT)) as listener:
        yield listener


@pytest.fixture
def ends(listener):
    """Both ends of a wire, the listener's first."""
    there = connect("127.0.0.1", listener.port, listener.key, limit=LIMIT)
    here = listener.accept(10)
    with closing(here), closing(there):
        yield here, there


def test_messages_come_whole_and_in_order(ends):
    """Also those that a socket cannot hold, and several at once."""
    here, there = ends
    sent = [b"1", bytes(range(256)) * (1 << 14), b"", b"last"]
    sender = threading.Thread(target=lambda: [there.send(message) for message in sent])
    sender.start()
    found: list[bytes] = []
    while len(found) < len(sent):
        found += here.receive(10)
    sender.join()
    assert found == sent
    assert here.receive() == []


def test_what_was_said_is_heard_before_the_end_is(ends):
    here, there = ends
    there.send(b"goodbye")
    there.close()
    assert here.receive(10) == [b"goodbye"]
    with pytest.raises(LinkLost):
        here.receive(10)


def test_another_key_opens_nothing(listener):
    with pytest.raises(LinkLost, match=f"127.0.0.1:{listener.port}: it closed the connection"):
        connect("127.0.0.1", listener.port, b"guessed")
    assert listener.accept(0.2) is None


def test_a_listener_without_the_key_is_not_believed():
    """Another process may have taken the port."""
    with socket.create_server(("127.0.0.1", 0)) as impostor:

        def answer():
            connected, _ = impostor.accept()
            with connected:
                connected.sendall(b"c" * 32)
                connected.recv(1024)
                connected.sendall(b"a" * 32)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(LinkLost, match="does not know the key"):
            connect("127.0.0.1", impostor.getsockname()[1], b"key")
        thread.join()


def drip(stranger):
    while True:
        try:
            stranger.sendall(b"x")
        except OSError:
            return
        time.sleep(0.05)


def test_strangers_keep_no_process_waiting_and_are_dropped(listener, monkeypatch):
    """Silent ones, ones that send a byte now and then, and more than may be greeted at a time."""
    monkeypatch.setattr(module, "GREETING", 1.0)
    with ExitStack() as stack:
        address = "127.0.0.1", listener.port
        strangers = [
            stack.enter_context(socket.create_connection(address)) for _ in range(2 * module._CROWD)
        ]
        threading.Thread(target=drip, args=(strangers[-1],), daemon=True).start()
        strangers[0].close()
        began = time.monotonic()
        assert listener.accept(0) is None
        assert time.monotonic() - began < 0.5
        with closing(connect(*address, listener.key)):
            assert listener.accept(10) is not None
        for stranger in strangers[1:]:
            stranger.settimeout(10)
            with suppress(ConnectionResetError):
                while stranger.recv(1024):  # the challenge, and the end
                    pass
        assert listener.accept(0) is None


def between(listener, change, stack):
    """A port that leads to `listener`; `change` is made to what comes after the handshake."""
    server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

    def lead():
        connected, _ = server.accept()
        onward = socket.create_connection(("127.0.0.1", listener.port))
        with connected, onward:
            connected.sendall(onward.recv(32))
            onward.sendall(connected.recv(72))
            connected.sendall(onward.recv(32))
            while data := connected.recv(1 << 16):
                onward.sendall(change(data))

    threading.Thread(target=lead, daemon=True).start()
    return server.getsockname()[1]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda data: data[:-1] + b"!", "was changed"),
        (lambda data: data + data, "was changed"),
        (lambda data: b"\xff" * 8 + data[8:], "a message of 18446744073709551615 bytes"),
    ],
    ids=["a byte", "sent twice", "its length"],
)
def test_a_message_that_was_changed_on_its_way_is_not_read(listener, change, reason):
    with ExitStack() as stack:
        port = between(listener, change, stack)
        there = stack.enter_context(closing(connect("127.0.0.1", port, listener.key)))
        here = listener.accept(10)
        stack.enter_context(closing(here))
        there.send(b"accept this")
        with pytest.raises(LinkLost, match=reason):
            here.receive(10)


def test_a_message_that_is_too_long_is_not_sent(ends):
    with pytest.raises(ValueError, match=f"at most {LIMIT}"):
        ends[0].send(bytes(LIMIT + 1))


def test_it_listens_at_its_own_address_alone(listener):
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", listener.port), timeout=5)
