"""Makes one TCP port of the node's network reachable on 127.0.0.1 of this machine.

usage: proxy.py NODE_PID TARGET_PORT PORT_FILE

The listening socket is opened here, then the process moves into the node's network, where it connects to
127.0.0.1:TARGET_PORT for each client. The port it got is written to PORT_FILE.
"""

import asyncio
import contextlib
import ctypes
import os
import socket
import sys
from pathlib import Path

CLONE_NEWNET = 0x40000000
CHUNK = 1 << 16


async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    """Move bytes until the end of the source, then pass that end on."""
    with contextlib.suppress(OSError):
        while data := await source.read(CHUNK):
            sink.write(data)
            await sink.drain()
        if sink.can_write_eof():
            sink.write_eof()


async def serve(listener: socket.socket, port: int) -> None:
    """Forward every connection; ends when the process is stopped."""

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream: asyncio.StreamWriter | None = None
        try:
            answer, upstream = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(copy(reader, upstream), copy(answer, writer))
        except OSError as error:
            print(f"proxy: {error}", file=sys.stderr, flush=True)
        finally:
            for end in (writer, upstream):
                if end is not None:
                    end.close()

    server = await asyncio.start_server(client, sock=listener)
    await server.serve_forever()


def main() -> None:
    node, port, file = sys.argv[1:]
    listener = socket.create_server(("127.0.0.1", 0))
    namespace = os.open(f"/proc/{node}/ns/net", os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, CLONE_NEWNET) != 0:
        code = ctypes.get_errno()
        sys.exit(f"proxy: cannot enter the node's network: {os.strerror(code)}")
    os.close(namespace)
    temporary = Path(f"{file}.new")
    temporary.write_text(f"{listener.getsockname()[1]}\n")
    temporary.replace(file)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(listener, int(port)))


main()
