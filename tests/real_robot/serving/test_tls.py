"""Encryption of the policy server: a real authority, certificates that are expired, another's or a stranger's."""

from __future__ import annotations

import logging
import shutil
import signal
import socket
import subprocess
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
from certificates import Authority
from toy_server import observation, toy_server, toy_thread

from real_robot.client_package.vla_rl_client import NotTrusted, PolicyClientError, ServerUnavailable
from real_robot.serving import server as server_module
from real_robot.serving.client import PolicyClient
from real_robot.serving.network import client_context, server_context
from real_robot.serving.server import PolicyServer, ServeConfig
from vla_rl.config import ConfigError

PATIENCE = 60.0


def encrypted(files: tuple[Path, Path]) -> dict[str, Path]:
    return dict(zip(("certificate", "key"), files, strict=True))


def client(address: str, ca: Path | None, token: str | None = None, **options: float) -> PolicyClient:
    times = {"connect_timeout": 20.0, "infer_timeout": PATIENCE, "retry_after": 0.0, **options}
    return PolicyClient(address, token, ca=ca, **times)


def test_an_encrypted_server_answers_those_who_trust_its_authority(tmp_path: Path) -> None:
    lab, token = Authority(tmp_path), "0123456789abcdef"
    with toy_thread(**encrypted(lab.sign("localhost", "127.0.0.1")), token=token) as server:
        for address in (server.address, f"wss://{server.address}", f"localhost:{server.port}"):
            with client(address, lab.pem, token) as ours:
                assert ours.address.startswith("wss://")
                assert ours.infer(observation(3))["actions"][0, 0] == 3


def test_a_certificate_that_proves_nothing_is_told_as_what_it_is(tmp_path: Path) -> None:
    lab, stranger = Authority(tmp_path), Authority(tmp_path, "stranger")
    with toy_thread(**encrypted(lab.sign("gpu-box", "127.0.0.1"))) as server:
        for ca, address, what in (
            (stranger.pem, server.address, r"not signed by an authority that we trust .*--ca"),
            (None, f"wss://{server.address}", r"not signed by an authority that we trust .*--ca"),
            (lab.pem, f"localhost:{server.port}", r"another's .*localhost"),
        ):
            with pytest.raises(NotTrusted, match=what) as told:
                client(address, ca).connect()
            assert str(server.port) in str(told.value)
        assert isinstance(client(server.address, lab.pem).connect(), PolicyClient)
    expired = encrypted(lab.sign("127.0.0.1", days=-1))
    with toy_thread(**expired) as server, pytest.raises(NotTrusted, match="has expired: make a new one, or set the"):
        client(server.address, lab.pem).connect()


def test_another_server_in_mid_run_gives_no_actions(tmp_path: Path) -> None:
    lab, stranger = Authority(tmp_path), Authority(tmp_path, "stranger")
    with toy_thread(**encrypted(lab.sign("127.0.0.1"))) as server:
        ours = client(server.address, lab.pem).connect()
        ours.infer(observation())
    with toy_thread(**encrypted(stranger.sign("127.0.0.1")), port=server.port):
        with pytest.raises(PolicyClientError):  # the connection is lost, unless that was noticed before
            ours.infer(observation())
        with pytest.raises(NotTrusted):
            ours.infer(observation())
    ours.close()


def test_one_side_that_does_not_encrypt_is_told_so(tmp_path: Path) -> None:
    lab = Authority(tmp_path)
    with toy_thread() as plain, pytest.raises(ServerUnavailable, match=f"it is ws://{plain.address}"):
        client(plain.address, lab.pem).connect()
    files = encrypted(lab.sign("127.0.0.1"))
    with toy_thread(**files) as server, pytest.raises(ServerUnavailable, match=f"it is wss://{server.address}, with"):
        client(f"ws://{server.address}", None).connect()
    with pytest.raises(ConfigError, match="is not encrypted; write wss://"):
        client("ws://gpu-box", lab.pem)


def test_a_send_to_an_encrypted_server_that_reads_nothing_is_given_up(tmp_path: Path) -> None:
    """Full buffers: SO_SNDTIMEO does nothing for TLS, which tries again by itself."""
    lab = Authority(tmp_path)
    files = lab.sign("127.0.0.1")
    with toy_server("--certificate", str(files[0]), "--key", str(files[1])) as server:
        ours = client(server.address, lab.pem, infer_timeout=1.0).connect()
        server.signal(signal.SIGSTOP)
        done = threading.Event()

        def ask() -> None:
            with pytest.raises(ServerUnavailable):
                ours.infer({**observation(), "state": bytes(64 * 1024 * 1024)})
            done.set()

        threading.Thread(target=ask, daemon=True).start()
        assert done.wait(30), "the send never came back"


def test_sockets_that_never_begin_to_encrypt_keep_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "HANDSHAKE_SECONDS", 2.0)
    lab = Authority(tmp_path)
    with toy_thread(**encrypted(lab.sign("127.0.0.1"))) as server, ExitStack() as stack:
        mute = [stack.enter_context(socket.create_connection(("127.0.0.1", server.port))) for _ in range(64)]
        with client(server.address, lab.pem) as ours:
            assert ours.infer(observation(3))["actions"][0, 0] == 3
        mute[0].settimeout(PATIENCE)
        assert mute[0].recv(1) == b"", "its handshake has a time-out"


def test_files_that_cannot_be_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lab = Authority(tmp_path)
    certificate, key = lab.sign("gpu-box")
    other, _ = lab.sign("other")
    rubbish, secret = tmp_path / "rubbish.pem", tmp_path / "secret.pem"
    rubbish.write_text("no PEM")
    locked = ["openssl", "pkey", "-in", str(key), "-aes256", "-passout", "pass:sixteen", "-out", str(secret)]
    for files, what in (
        ((None, key), "a key without its certificate"),
        ((tmp_path / "none.pem", key), "none.pem: cannot be read"),
        ((certificate, tmp_path / "none.pem"), "--key .*none.pem: cannot be read"),
        ((other, key), "is not the key of"),
        ((certificate, None), r"and its private key \(or give --key\)"),
        ((rubbish, key), "expected PEM"),
    ):
        with pytest.raises(ConfigError, match=what):
            server_context(*files)
    if shutil.which("openssl"):
        subprocess.run(locked, check=True)
        secret.chmod(0o600)
        with pytest.raises(ConfigError, match=r"is encrypted\. Make it plain"):
            PolicyServer(lambda: pytest.fail("loaded"), ServeConfig(certificate=certificate, key=secret))
    for wrong, what in ((tmp_path / "none.pem", "cannot be read"), (rubbish, "no certificate in PEM")):
        with pytest.raises(ConfigError, match=f"--ca .*{what}"):
            client_context(wrong)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert server_context(certificate, key) is not None and not caplog.records
        key.chmod(0o644)
        assert server_context(certificate, key) is not None
    assert "others may read it (mode 644)" in caplog.text and f"chmod 600 {key}" in caplog.text


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_the_certificate_of_the_docs_works(tmp_path: Path) -> None:
    """The command of docs/serve.md, with this machine's address for the names there."""
    text = (Path(__file__).parents[3] / "docs" / "serve.md").read_text()
    command = text[text.index("openssl req") :].partition("```")[0].replace("\\\n", " ")
    assert "DNS:gpu-box,IP:10.0.0.5" in command
    command = command.replace("DNS:gpu-box,IP:10.0.0.5", "DNS:gpu-box,IP:127.0.0.1")
    subprocess.run(command, shell=True, check=True, cwd=tmp_path, capture_output=True)
    files = tmp_path / "cert.pem", tmp_path / "key.pem"
    assert (files[1].stat().st_mode & 0o077) == 0
    with toy_thread(**encrypted(files)) as server, client(server.address, files[0]) as ours:
        assert ours.infer(observation(3))["actions"][0, 0] == 3
