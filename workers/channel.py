"""The control channel: msgpack messages over ZeroMQ sockets, one inbox per process.

Every process pulls from one socket it binds and pushes to the inboxes of the others. Messages of one sender arrive in
the order sent; messages of different senders interleave, so receivers match them by step.
"""

from __future__ import annotations

from typing import Any

import msgspec
import zmq

from eyas.workers.messages import RouterInbox, WorkerInbox

_LINGER_MS = 200


class Inbox:
    """A bound socket and the message union that arrives on it."""

    def __init__(self, context: zmq.Context[Any], bind_address: str, message_type: Any) -> None:
        """Bind.

        Args:
            bind_address: `ipc://PATH`, or `tcp://HOST:*` for a free port.
            message_type: a tagged msgspec union.
        """
        self._socket = context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(bind_address)
        self._decoder = msgspec.msgpack.Decoder(message_type)
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def receive(self, timeout_s: float | None = None) -> Any:
        """The next message, or None when `timeout_s` passes without one."""
        if timeout_s is not None and not self._socket.poll(int(timeout_s * 1e3)):
            return None
        return self._decoder.decode(self._socket.recv())

    def close(self) -> None:
        self._socket.close()


class Outbox:
    """A socket connected to somebody's inbox."""

    def __init__(self, context: zmq.Context[Any], address: str) -> None:
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._socket.connect(address)
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message; never waits for the receiver."""
        self._socket.send(self._encoder.encode(message))

    def close(self) -> None:
        self._socket.close()


def worker_inbox(context: zmq.Context[Any], bind_address: str) -> Inbox:
    return Inbox(context, bind_address, WorkerInbox)


def router_inbox(context: zmq.Context[Any], bind_address: str) -> Inbox:
    return Inbox(context, bind_address, RouterInbox)
