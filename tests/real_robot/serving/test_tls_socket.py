"""The client's encrypted socket: read and written at once by two threads, as websockets does it."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from certificates import Authority

from real_robot.client_package.vla_rl_client import TlsSocket
from real_robot.serving.network import client_context, server_context

COUNT, SIZE = 3000, 256


@contextmanager
def peer(certificate: tuple[Path, Path], version: ssl.TLSVersion) -> Iterator[int]:
    """A server that sends COUNT messages while it counts what it is sent, then tells how much that was. Its port."""
    context = server_context(*certificate)
    assert context is not None
    context.maximum_version = version
    started, ports = threading.Event(), []

    async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def count() -> int:
            return len(await reader.readexactly(COUNT * SIZE))

        with suppress(OSError, asyncio.IncompleteReadError):
            async with asyncio.TaskGroup() as tasks:
                counted = tasks.create_task(count())
                for number in range(COUNT):
                    writer.write(number.to_bytes(4, "big") * (SIZE // 4))
                    await asyncio.sleep(0)
                writer.write(b"\0" * 300_000)  # many records at once
            writer.write(counted.result().to_bytes(4, "big"))
            await writer.drain()
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(serve_one, "127.0.0.1", 0, ssl=context)
        ports.append(server.sockets[0].getsockname()[1])
        stops.append((asyncio.get_running_loop(), asyncio.Event()))
        started.set()
        await stops[0][1].wait()
        server.close()

    stops: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
    thread = threading.Thread(target=asyncio.run, args=(run(),), daemon=True)
    thread.start()
    assert started.wait(10)
    yield ports[0]
    loop, stop = stops[0]
    loop.call_soon_threadsafe(stop.set)
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


def test_closing_ends_a_wait_for_the_rest_of_a_record(tmp_path: Path) -> None:
    """Of a server that went down in the middle of one: websockets closes, then waits for its thread without limit."""
    lab = Authority(tmp_path)
    context = server_context(*lab.sign("127.0.0.1"))
    assert context is not None
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def send_half_a_record() -> None:
            connection, _ = listener.accept()
            same = connection.dup()
            encrypted = context.wrap_socket(connection, server_side=True)
            same.sendall(b"\x17\x03\x03\x00\xff" + bytes(10))  # 255 bytes of data are announced
            stop.wait(30)
            encrypted.close()
            same.close()

        stop = threading.Event()
        threading.Thread(target=send_half_a_record, daemon=True).start()
        plain = socket.create_connection(listener.getsockname(), 30)
        ours = TlsSocket(plain, client_context(lab.pem), "127.0.0.1")
        ours.settimeout(None)
        got: list[bytes] = []
        reading = threading.Thread(target=lambda: got.append(ours.recv(1024)), daemon=True)
        reading.start()
        reading.join(0.5)
        assert reading.is_alive(), "it waits for the rest"
        ours.close()
        reading.join(10)
        stop.set()
        assert not reading.is_alive() and got == [b""]
