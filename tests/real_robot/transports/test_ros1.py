"""ROS 1 for real: a master, a plain rospy node, and our transport in a process of its own."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import ROOT, Child, RosGraph, missing_ros, until
from test_messages import EXAMPLES

from real_robot.transports.base import TransportError
from real_robot.transports.ros import install
from real_robot.transports.ros.master import free_port, is_gone, master_pid, service_uri, topic_ends
from real_robot.transports.ros1 import Ros1Config

needs_ros = pytest.mark.skipif(bool(missing_ros()), reason=missing_ros() or "ROS 1 is there")

# Subscribes and advertises each type on /echo/TYPE, sends the example until it is back, prints what came.
ROUND_TRIP = """
import sys, time
sys.path.insert(0, "tests/real_robot/transports")
from real_robot.transports.ros.typestore import plain_tree
from real_robot.transports.base import QosConfig, TransportError
from real_robot.transports.ros1 import Ros1Config
from test_messages import EXAMPLES
import json
transport = Ros1Config().open()
got = {}
def keep(name):
    return lambda message: got.__setitem__(name, message)
publishers = []
for message in EXAMPLES:
    name = type(message).__name__
    transport.subscribe(f"/{name}", type(message), QosConfig(depth=10), keep(name))
    publishers.append((transport.advertise(f"/{name}", type(message), QosConfig(depth=10)), message))
deadline = time.monotonic() + 20
while len(got) < len(EXAMPLES) and time.monotonic() < deadline:
    for publish, message in publishers:
        publish(message)
    time.sleep(0.02)
same = {n: repr(m.tree()) == repr(type(m).from_tree(next(e for e in EXAMPLES if type(e) is type(m)).tree()).tree())
        for n, m in got.items()}
print(json.dumps([same, transport.fault]))
try:
    Ros1Config().open()
except TransportError as error:
    print(error)
transport.close()
"""


@pytest.fixture
def graph(tmp_path: Path) -> Iterator[RosGraph]:
    graph = RosGraph(tmp_path)
    yield graph
    graph.close()


@pytest.mark.live
@needs_ros
def test_every_message_goes_round_the_graph(graph: RosGraph) -> None:
    node = graph.start("node", "-c", ROUND_TRIP)
    until(lambda: node.process.poll() is not None, "the round trip", 60)
    lines = node.output().splitlines()
    assert node.process.returncode == 0, node.output()
    same, fault = json.loads(lines[0])
    assert same == {type(m).__name__: True for m in EXAMPLES} and fault is None
    assert "one node a process" in lines[1]
    pid = master_pid(graph.master.uri)
    assert pid == graph.master.process.pid
    graph.master.close()
    assert master_pid(graph.master.uri) is None


@pytest.mark.live
@needs_ros
def test_a_master_that_is_asked_to_end_leaves_nothing_behind(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "vla_rl", "robot", "sim", "--master", f"only:{port}"]
    child = Child(command, tmp_path / "master.log", {**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        until(lambda: child.says("ROS master: ") and master_pid(f"http://127.0.0.1:{port}"), "the master")
        child.end(60)
        assert master_pid(f"http://127.0.0.1:{port}") is None
    finally:
        child.kill()


@needs_ros
def test_without_a_master_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROS_MASTER_URI", "")  # as it is afterwards
    with pytest.raises(TransportError, match=r"no ROS master answers at http://127\.0\.0\.1:9"):
        Ros1Config(master="http://127.0.0.1:9").open()


# --- installation ------------------------------------------------------------------------------


def test_without_apt_the_message_says_what_else_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(install.RosInstallError, match=r"apt-get not found.*rosbridge"):
        install.install(tmp_path / "ros1")


def fake_apt(folder: Path, body: str) -> None:
    for name, text in (("apt-get", body), ("dpkg-deb", 'mkdir -p "$3"; touch "$3/unpacked"')):
        path = folder / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)


def test_where_nothing_can_be_fetched_apts_last_words_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_apt(tmp_path, "echo E: no such package >&2; exit 100")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(install.RosInstallError, match="apt-get update failed:\n  E: no such package"):
        install.install(tmp_path / "ros1", report=lambda text: None)
    assert not (tmp_path / "ros1").exists(), "nothing half-made is left"


def test_modules_that_do_not_import_are_no_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_apt(tmp_path, 'for a in "$@"; do case "$a" in python3-*) touch "$a.deb" ;; esac; done')
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(install.RosInstallError, match=r"do not import.*pip install"):
        install.install(tmp_path / "ros1", report=lambda text: None)
    assert not install.is_installed(tmp_path / "ros1")


@needs_ros
def test_what_is_installed_is_not_fetched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    if not install.is_installed():
        pytest.skip("rospy comes from a ROS installation here")
    monkeypatch.setenv("PATH", "/nowhere")
    assert install.install() == install.ros_folder()


CUT_OFF = b"<?xml version='1.0'?><methodResponse><params><param><value><arr"


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Type: text/xml\r\nContent-Length: 500\r\n\r\n" + CUT_OFF,
        b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 6\r\n\r\n<html>",
    ],
    ids=["another program", "cut off", "a page"],
)
def test_a_master_that_dies_in_its_answer_or_is_none_does_not_answer(answer: bytes) -> None:
    """Not an error: it would end the thread that watches over the master, and with it the watch."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(65536)
                    connection.sendall(answer)
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(65536):  # A close with the request's rest unread would reset the connection.
                        pass

        threading.Thread(target=serve, daemon=True).start()
        uri = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert master_pid(uri) is None and service_uri(uri, "/s") == "" and not is_gone(uri, "/n")
        with pytest.raises(OSError, match="does not answer as one"):
            topic_ends(uri)
