"""The client's encrypted socket: read and written at once by two threads, as websockets does it."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from certificates import Authority

from real_robot.client_package.vla_rl_client import TlsSocket
from real_robot.serving.tls import client_context, server_context

COUNT, SIZE = 3000, 256


@contextmanager
def peer(certificate: tuple[Path, Path], versions: ssl.TLSVersion) -> Iterator[int]:
    """A server that sends COUNT messages while it counts what it is sent, then tells how much that was. Its port."""
    context = server_context(*certificate)
    assert context is not None
    context.maximum_version = versions
    loop, started, ports = asyncio.new_event_loop(), threading.Event(), []

    async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def count() -> int:
            return len(await reader.readexactly(COUNT * SIZE))

        counted = asyncio.ensure_future(count())
        for number in range(COUNT):
            writer.write(number.to_bytes(4, "big") * (SIZE // 4))
            await asyncio.sleep(0)
        writer.write(b"\0" * 300_000)  # many records at once
        writer.write((await counted).to_bytes(4, "big"))
        await writer.drain()
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(serve_one, "127.0.0.1", 0, ssl=context)
        ports.append(server.sockets[0].getsockname()[1])
        started.set()

    def live() -> None:
        loop.run_until_complete(run())
        loop.run_forever()

    thread = threading.Thread(target=live, daemon=True)
    thread.start()
    assert started.wait(10)
    yield ports[0]
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_one_thread_reads_while_others_write(tmp_path: Path, version: ssl.TLSVersion) -> None:
    lab = Authority(tmp_path)
    with peer(lab.sign("127.0.0.1"), version) as port:
        plain = socket.create_connection(("127.0.0.1", port), 30)
        with TlsSocket(plain, client_context(lab.pem), "127.0.0.1") as ours:

            def write(times: int) -> None:
                for _ in range(times):
                    ours.sendall(b"x" * SIZE)

            writers = [threading.Thread(target=write, args=(COUNT // 2,)) for _ in range(2)]
            for writer in writers:
                writer.start()
            got = bytearray()
            while data := ours.recv(65536):
                got += data
            for writer in writers:
                writer.join()
    expected = b"".join(number.to_bytes(4, "big") * (SIZE // 4) for number in range(COUNT)) + b"\0" * 300_000
    assert got == expected + (COUNT * SIZE).to_bytes(4, "big")


def test_all_that_arrived_is_returned_at_once(tmp_path: Path) -> None:
    """websockets waits for the network, which stays silent while decrypted bytes wait in the socket."""
    lab = Authority(tmp_path)
    with peer(lab.sign("127.0.0.1"), ssl.TLSVersion.TLSv1_3) as port:
        plain = socket.create_connection(("127.0.0.1", port), 30)
        with TlsSocket(plain, client_context(lab.pem), "127.0.0.1") as ours:
            total = 0
            while total < COUNT * SIZE + 300_000:
                total += len(ours.recv(1024))
                assert ours._decrypted(1024) is None


def test_a_refused_certificate_closes_the_socket(tmp_path: Path) -> None:
    lab, stranger = Authority(tmp_path), Authority(tmp_path, "stranger")
    with peer(lab.sign("127.0.0.1"), ssl.TLSVersion.TLSv1_3) as port:
        for trusted, name in ((stranger.pem, "127.0.0.1"), (lab.pem, "127.0.0.2")):
            plain = socket.create_connection(("127.0.0.1", port), 30)
            with pytest.raises(ssl.SSLCertVerificationError):
                TlsSocket(plain, client_context(trusted), name)
            assert plain.fileno() == -1


def test_a_server_that_says_nothing_is_given_up(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        plain = socket.create_connection(mute.getsockname(), 0.2)
        with pytest.raises(TimeoutError):
            TlsSocket(plain, ssl.create_default_context(), "127.0.0.1")
