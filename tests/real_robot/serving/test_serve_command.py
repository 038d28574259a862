"""`vla-rl serve` and scripts/robot_bench.py with a real policy, in processes of their own."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from real_robot.bridge.sim_robot import SimRobotConfig
from real_robot.serving.client import PolicyClient
from real_robot.types import RobotObservation
from vla_rl.cli.app import app
from vla_rl.config import apply_overrides, validate
from vla_rl.evaluation.evaluate import policy_hash
from vla_rl.policies.base import resolve_path
from vla_rl.policies.load import load_policy
from vla_rl.types import Observation

ROOT = Path(__file__).resolve().parents[3]
MAIN = [sys.executable, "-c", "from vla_rl.cli import main; main()"]


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = CliRunner().invoke(app, ["serve", "pretrained:tabletop_base", "--port", str(port), "--device", "cpu"])
    assert found.exit_code == 2 and f"--port: {port} of 127.0.0.1 is in use; end what listens there" in found.stderr


@pytest.mark.parametrize("command", ["serve", "deploy", "hub"])
def test_a_plain_install_names_the_extra(command: str) -> None:
    program = "import sys; sys.modules['websockets'] = None; from vla_rl.cli import main; main()"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", program, command, "so101"]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 2
    assert done.stderr == f"error: {command}: websockets is not installed. Run: pip install '.[robot]'\n"


@pytest.mark.slow
def test_a_served_policy_answers_as_it_does_at_home() -> None:
    command = [*MAIN, "serve", "pretrained:tabletop_base", "--port", "0", "--device", "cpu", "--control-hz", "20"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline().partition(";")[0].rpartition(":")[2])
        assert "ready: pretrained:tabletop_base" in process.stdout.readline()
        then = "next, in another terminal: vla-rl deploy ROBOT.yaml --server ws://127.0.0.1:"
        assert process.stdout.readline().startswith(f"{then}{port} ")
        rng = np.random.default_rng(0)
        image = rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)
        state = rng.uniform(-0.1, 0.1, 8).astype(np.float32)
        text = "push the red block to the zone"
        with PolicyClient(f"127.0.0.1:{port}", infer_timeout=60) as client:
            assert client.metadata["control_hz"] == 20 and client.metadata["state_dim"] == 8
            expected = policy_hash(resolve_path("pretrained:tabletop_base"))
            assert client.metadata["policy_hash"] == expected
            assert client.metadata["policy_version"] == f"tabletop_base {expected[:12]}", "as `vla-rl collect` has it"
            reply = client.act(RobotObservation({"agentview": image}, state, text, 0.0), embedding=True)
        policy = load_policy("pretrained:tabletop_base", "cpu")
        obs = Observation({"agentview": image[None]}, state[None], [text])
        np.testing.assert_allclose(reply["actions"], policy.act(obs, temperature=0).actions[0], atol=1e-5)
        np.testing.assert_allclose(reply["embedding"], policy.embed(obs)[0].numpy(), atol=1e-4)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "--port", "0"], "no such folder"),
        (["pretrained:tabletop_base", "--host", "0.0.0.0", "--port", "0"], "a token is required"),
        (["pretrained:tabletop_base", "--token-file", "nowhere"], "token file nowhere: cannot be read"),
        (["pretrained:tabletop_base", "--port", "0", "--action-names", "a,b"], "got 2 names"),
        (["pretrained:tabletop_base", "--port", "99999"], "less than or equal to 65535"),
        (["pretrained:tabletop_base", "--certificate", "nowhere.pem"], "--certificate nowhere.pem: cannot be read"),
        (["pretrained:tabletop_base", "--key", "nowhere.pem"], "a key without its certificate"),
        (["pretrained:tabletop_base", "--allow-host", "http://x"], "--allow-host 'http://x': expected a host's name"),
        (["pretrained:tabletop_base", "--camera", "front"], "expected NAME=KEY"),
        (["pretrained:tabletop_base", "--port", "0", "--camera", "front=images/top"], "no camera 'front'"),
    ],
)
def test_what_cannot_be_served_is_told(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert result.exit_code == 2 and message in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--server", "::1"], "'::1': an IPv6 address stands in brackets"),
        (["--server", "http://gpu-box"], "http:// is not spoken here. Allowed: host, host:port"),
        (["--ca", "nowhere.pem"], "--ca nowhere.pem: cannot be read"),
        (["--ca", "nowhere.pem", "--server", "ws://gpu-box"], "is not encrypted; write wss://"),
        (["--certificate", "cert.pem"], "--certificate: is of the console; give --console PORT too"),
        (["--allow-host", "robot.lab"], "--allow-host: is of the console"),
        (["--console-token-file", "token"], "--console-token-file: is of the console; give --console PORT too"),
        (["--console-origin", "http://bench2:8080"], "--console-origin: is of the console"),
    ],
)
def test_what_deploy_cannot_use_of_it_is_told(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["deploy", "sim_robot", "--instruction", "go", *arguments])
    assert result.exit_code == 2 and message in " ".join(result.output.split())


def test_the_examples_of_sim_robots_help_are_options_of_it() -> None:
    result = CliRunner().invoke(app, ["robot", "sim", "--help"], env={"COLUMNS": "400"})
    examples = re.findall(r"\b[a-z_.]+=\S+", result.output.split("for example", 1)[1].splitlines()[0])
    assert len(examples) > 1
    validate(SimRobotConfig, apply_overrides({}, examples), prefix="sim")


@pytest.mark.slow
def test_the_bench_prints_its_table() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "scripts/robot_bench.py"), "--seconds", "3", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    result = json.loads(done.stdout)
    assert result["ticks"] == 60 and result["chunks"] > 3 and result["running"] > 10
    assert result["added"][0] > 0 and result["round_trip"][0] > result["inference"][0]
