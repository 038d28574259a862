"""The client for a robot's old Python: its syntax, that it imports nothing of ours, and talks with the real server."""

from __future__ import annotations

import ast
import importlib
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from toy_server import ToyThread, observation, toy_thread
from websockets.sync.server import ServerConnection, serve

from real_robot.client_package.vla_rl_client import ServerError
from real_robot.client_package.vla_rl_client.wire import pack
from real_robot.serving.client import PolicyClient

PACKAGE = Path(__file__).resolve().parents[3] / "real_robot" / "client_package"
FOLDER = PACKAGE / "vla_rl_client"
TOKEN = "correct-horse-battery-staple"
OLD = ("python3.8", "python3.9", "python3.10", "python3.11")
TALK = """
import sys
import numpy as np
from vla_rl_client import PolicyClient
image = np.zeros((32, 32, 3), np.uint8)
with PolicyClient(sys.argv[1], token=sys.argv[2], infer_timeout=20) as client:
    actions = client.act({"agentview": image, "wrist": image}, np.array([2.0, 0, 0, 0, 0]), "go")
print(sys.version_info[:2], actions[:, 0].tolist(), "torch" in sys.modules, client.metadata["chunk_size"])
"""


@pytest.fixture(scope="module")
def module() -> ModuleType:
    """The package as it is when installed alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(PACKAGE)
        return importlib.import_module("vla_rl_client")


@pytest.fixture(scope="module")
def server() -> Iterator[ToyThread]:
    with toy_thread(token=TOKEN) as running:
        yield running


def test_it_is_python_3_8_and_stands_alone() -> None:
    files = sorted(FOLDER.glob("*.py"))
    nodes = [n for file in files for n in ast.walk(ast.parse(file.read_text(), feature_version=(3, 8)))]
    imports = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imports |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
    foreign = {name.partition(".")[0] for name in imports} - set(sys.stdlib_module_names)
    assert foreign == {"numpy", "msgpack", "websockets"}


def test_it_gets_actions_and_goes_on_after_an_error(module: ModuleType, server: ToyThread) -> None:
    with module.PolicyClient(server.address, token=TOKEN, infer_timeout=20) as client:
        assert client.metadata["cameras"] == ["agentview", "wrist"]
        images = observation()["images"]
        for x in (2.0, 3.0):
            actions = client.act(images, np.array([x, 0, 0, 0, 0]), "go")
            assert actions.dtype == np.float32 and actions[:, 0].tolist() == [x, x + 1, x + 2, x + 3]
        with pytest.raises(module.ServerError, match="no image of camera 'wrist'"):
            client.act({"agentview": images["agentview"]}, np.zeros(5), "go")
        assert client.act(images, np.zeros(5), "go").shape == (4, 3), "it connects anew"


def test_a_late_answer_is_never_the_next_ones(module: ModuleType, server: ToyThread) -> None:
    with module.PolicyClient(server.address, token=TOKEN, infer_timeout=0.1) as client:
        images = observation()["images"]
        with pytest.raises(module.InferenceTimeout, match=r"did not answer in 0\.1 s"):
            client.act(images, np.full(5, 7.0), "wait")
        with server.computing():
            client._infer_timeout = 20.0
        assert client.act(images, np.zeros(5), "go")[0, 0] == 0


def test_who_is_not_let_in_is_told(module: ModuleType, server: ToyThread) -> None:
    with pytest.raises(module.NotAuthorized, match=r"\(401\)"):
        module.PolicyClient(server.address, token="another-word-of-some-length").__enter__()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(module.ServerUnavailable, match="Is `vla-rl serve` running there"):
            module.PolicyClient(f"127.0.0.1:{taken.getsockname()[1]}").__enter__()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"\xc1", "unreadable answer"),
        (b"\x93\x01\x02\x03", "a map of names to values, got list"),
        ({"actions": np.array([[1.0, np.nan]])}, "without finite actions"),
        ({"actions": np.zeros(3)}, r"answer without actions \(H, A\)"),
        ({"actions": {b"__ndarray__": True, b"data": b"12", b"dtype": "|O", b"shape": [1]}}, "array dtype '.O'"),
        ({"actions": {b"__ndarray__": True, b"data": b"12", b"dtype": "<f4", b"shape": [9]}}, "needs 36 bytes, got 2"),
    ],
)
def test_a_hostile_answer_is_an_error(module: ModuleType, answer: object, message: str) -> None:
    def handle(connection: ServerConnection) -> None:
        connection.send(pack({}))
        connection.recv()
        packed = answer if isinstance(answer, bytes) else pack(answer)
        connection.send(packed)

    with serve(handle, "127.0.0.1", 0) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        try:
            port = listening.socket.getsockname()[1]
            with (
                module.PolicyClient(f"127.0.0.1:{port}", infer_timeout=20) as client,
                pytest.raises(module.ServerError, match=message),
            ):
                client.act({}, np.zeros(1), "go")
        finally:
            listening.shutdown()
            thread.join()


@pytest.mark.parametrize("is_ours", [True, False], ids=["vla-rl's", "the package's"])
def test_a_server_of_another_protocol_is_refused(module: ModuleType, is_ours: bool) -> None:
    """Its numbers may mean something else."""

    def handle(connection: ServerConnection) -> None:
        connection.send(pack({"server": "vla-rl", "protocol": 2}))
        connection.recv()

    kind, error = (PolicyClient, ServerError) if is_ours else (module.PolicyClient, module.ServerError)
    with serve(handle, "127.0.0.1", 0) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        try:
            with (
                pytest.raises(error, match="speaks protocol 2, this client 1"),
                kind(f"127.0.0.1:{listening.socket.getsockname()[1]}", ready_timeout=20),
            ):
                pass
        finally:
            listening.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("address", "encrypted", "url"),
    [
        ("lab:9000/policies", False, "ws://lab:9000/policies"),
        ("lab/policies", True, "wss://lab:8000/policies"),
        ("gpu-box", False, "ws://gpu-box:8000"),
        ("gpu-box:9000", True, "wss://gpu-box:9000"),
        ("[::1]", False, "ws://[::1]:8000"),
        ("[::1]:9000", False, "ws://[::1]:9000"),
        ("wss://policies.lab:443/", False, "wss://policies.lab:443"),
    ],
)
def test_addresses(module: ModuleType, address: str, encrypted: bool, url: str) -> None:
    assert module._url(address, encrypted) == url
    with pytest.raises(ValueError, match="expected host"):
        module._url(f"http://{address}", encrypted)


@pytest.mark.slow
@pytest.mark.network
def test_it_installs_and_runs_in_an_old_python(server: ToyThread, tmp_path: Path) -> None:
    places = [shutil.which(name) for name in OLD]
    places += [str(one) for name in OLD for one in sorted(Path.home().glob(f".pyenv/versions/{name[6:]}*/bin/python"))]
    old = next((place for place in places if place and has_venv(place)), None)
    if old is None:
        pytest.skip(f"none of {', '.join(OLD)} here")
    subprocess.run([old, "-m", "venv", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    shutil.copytree(PACKAGE, tmp_path / "package")
    subprocess.run([str(python), "-m", "pip", "install", "-q", str(tmp_path / "package")], check=True)
    command = [str(python), "-c", TALK, server.address, TOKEN]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.strip().endswith("[2.0, 3.0, 4.0, 5.0] False 4")


def has_venv(python: str) -> bool:
    return subprocess.run([python, "-c", "import venv"], check=False, capture_output=True).returncode == 0
