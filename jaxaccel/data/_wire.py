"""Python objects over a socket, their arrays straight into memory of their own.

Measured against shared memory: the same speed, without segments that could leak.
`multiprocessing.Connection` takes ten times as long for batches of many megabytes.
"""

import pickle
import socket
import struct
from typing import Any

import numpy as np

from jaxaccel.data._store import aligned_empty

Frame = tuple[bytes, list[pickle.PickleBuffer]]

_COUNT = struct.Struct("!I")
_SIZE = struct.Struct("!Q")
# Larger pieces fail on some systems.
_PIECE = 1 << 30


def pack(value: Any) -> Frame:
    """Pickles an object; the arrays in it are referenced, not copied."""
    buffers: list[pickle.PickleBuffer] = []
    content = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return content, buffers


def send(connection: socket.socket, frame: Frame) -> None:
    """Sends a packed object, waiting until the other side has taken most of it."""
    content, buffers = frame
    pieces = [memoryview(content), *(buffer.raw() for buffer in buffers)]
    head = _COUNT.pack(len(pieces)) + b"".join(_SIZE.pack(len(p)) for p in pieces)
    connection.sendall(head)
    for piece in pieces:
        connection.sendall(piece)


def receive(connection: socket.socket) -> Any:
    """Receives an object; its arrays are writable and nothing else refers to them.

    Args:
      connection: A blocking stream socket.

    Raises:
      EOFError: If the other side is gone.
    """
    (count,) = _COUNT.unpack(_read(connection, _COUNT.size))
    sizes = _read(connection, count * _SIZE.size)
    pieces = [_read(connection, size) for (size,) in _SIZE.iter_unpack(sizes)]
    return pickle.loads(pieces[0], buffers=pieces[1:])


def _read(connection: socket.socket, size: int) -> memoryview:
    out = rest = aligned_empty((size,), np.dtype(np.uint8)).data
    while rest:
        got = connection.recv_into(rest[:_PIECE], 0, socket.MSG_WAITALL)
        if not got:
            raise EOFError("the other process is gone")
        rest = rest[got:]
    return out
