"""openpi's clients for LIBERO, DROID and ALOHA, unchanged: their keys, pictures, states and prompts.

With OPENPI=/path/to/openpi (a clone of github.com/Physical-Intelligence/openpi) its own `simple_client` runs too, with
OPENPI_PYTHON if that is another interpreter, with examples/simple_client/requirements.txt.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openpi_like import ALOHA, OpenpiClient, pack, picture, request
from watch_bench import served

from real_robot.client_package.vla_rl_client.wire import unpack
from real_robot.serving.requests import PolicyFacts, RequestError, camera_keys, read_request
from real_robot.serving.server import ServeConfig, load_for_serving, policy_facts
from vla_rl.config import ConfigError
from vla_rl.interfaces import Policy
from vla_rl.types import ActionChunk, Observation

OPENPI = os.environ.get("OPENPI", "")
CAMERAS = {
    "libero": ("agentview", "wrist"),
    "droid": ("exterior_image_1_left", "wrist_image_left"),
    "aloha": ALOHA,
    "aloha_sim": ("cam_high",),
}
STATES = {"libero": 8, "droid": 8, "aloha": 14, "aloha_sim": 14}


class Remembers(Policy):
    """Answers with its state, and keeps what it saw."""

    chunk_size, uses_state, image_size, num_embedded = 10, True, (224, 224), 0

    def __init__(self, robot: str) -> None:
        self.cameras, self.state_dim = CAMERAS[robot], STATES[robot]
        self.action_dim = self.state_dim
        self.seen: Observation | None = None

    def act(self, obs: Observation, generator: Any = None, temperature: float = 1.0) -> ActionChunk:
        self.seen = obs
        return ActionChunk(np.repeat(obs.state[:, None], self.chunk_size, 1).astype(np.float32))


def facts_of(policy: Policy, **options: Any) -> PolicyFacts:
    return policy_facts(policy, "toy", "toy", "f" * 64, ServeConfig(**options))


# SHA-256, shortened, of what `openpi_client.msgpack_numpy.Packer` of openpi 15a9616 makes of these requests.
@pytest.mark.parametrize(
    ("robot", "digest"),
    [("aloha", "91190d92a4501f4c"), ("droid", "2f01bd13d6e3ee30"), ("libero", "fbc95e9a7425b7a5")],
)
def test_their_bytes_are_answered(robot: str, digest: str) -> None:
    data = pack(request(robot))
    assert hashlib.sha256(data).hexdigest()[:16] == digest, "no longer what their clients send"
    policy = Remembers(robot)
    with served(policy, facts=facts_of(policy)) as port:
        theirs = OpenpiClient(port)
        reply = theirs.infer(request(robot))
        theirs.connection.close()
    state = np.ones(14) if robot == "aloha" else np.append(np.arange(7) / 8, [0.5 if robot == "droid" else 7 / 8])
    np.testing.assert_array_equal(reply["actions"], np.tile(state.astype(np.float32), (10, 1)))
    assert reply["policy"] == {"name": "toy", "version": "toy ffffffffffff", "hash": "f" * 64}
    assert all(isinstance(value, int | float) for value in reply["server_timing"].values()), (
        "their client averages them"
    )
    assert policy.seen is not None and policy.seen.instruction == ["do something"]
    for i, camera in enumerate(CAMERAS[robot]):
        expected = picture(i, True).transpose(1, 2, 0) if robot == "aloha" else picture(i)
        np.testing.assert_array_equal(policy.seen.images[camera][0], expected)


def read(robot: str, message: dict[str, Any], **options: Any) -> Any:
    return read_request(unpack(pack(message)), facts_of(Remembers(robot), **options)).observation


def test_alohas_simulator_sends_one_camera_and_leaves_the_prompt_to_the_server() -> None:
    message = {"state": np.zeros(14), "images": {"cam_high": picture(0, True)}}
    assert read("aloha_sim", message, default_prompt="transfer the cube").instruction == ["transfer the cube"]
    assert read("aloha_sim", {**message, "prompt": "wait"}, default_prompt="transfer").instruction == ["wait"]
    with pytest.raises(RequestError, match=r"instruction \(or prompt\): expected a text, got None"):
        read("aloha_sim", message)
    with pytest.raises(RequestError, match="no image of camera 'cam_low'; send one of the keys images/cam_low"):
        read("aloha", {**message, "prompt": "go"})


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("channels_first", [True, False])
def test_pictures_as_lerobot_stores_them(dtype: type, channels_first: bool) -> None:
    values = picture(0, channels_first)
    message = {**request("droid"), "observation/exterior_image_1_left": (values / 255).astype(dtype)}
    got = read("droid", message).images["exterior_image_1_left"][0]
    np.testing.assert_array_equal(got, values.transpose(1, 2, 0) if channels_first else values)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"observation/gripper_position": ...}, "joint_position without observation/gripper_position"),
        ({"observation/joint_position": ...}, "gripper_position without observation/joint_position"),
        ({"observation/state": np.zeros(8)}, "given twice"),
        ({"observation/joint_position": np.zeros(6)}, "expected 8 numbers, got 7"),
        ({"observation/joint_position": np.full(7, np.nan)}, "joint_position: holds NaN"),
        ({"observation/gripper_position": "open"}, "gripper_position: expected numbers"),
        ({"observation/exterior_image_1_left": np.full((224, 224, 3), 1.5)}, "floats from 0 to 1, got .* to 1.5"),
        ({"observation/exterior_image_1_left": np.zeros((4, 224, 224), np.uint8)}, "got uint8"),
        ({"observation/exterior_image_1_left": np.zeros((0, 0, 3))}, "got float64|pixels"),
    ],
)
def test_what_droid_may_not_send(change: dict[str, Any], what: str) -> None:
    message = {key: value for key, value in {**request("droid"), **change}.items() if value is not ...}
    with pytest.raises(RequestError, match=what):
        read("droid", message)


def test_a_lone_number_is_the_grippers_position() -> None:
    for number in (0.25, np.array(0.25), np.float32(0.25), [0.25]):
        assert read("droid", {**request("droid"), "observation/gripper_position": number}).state[0, 7] == 0.25


def test_keys_of_cameras_with_other_names() -> None:
    keys = camera_keys(("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb"))
    assert keys["base_0_rgb"][2:] == ("observation/image", "observation/exterior_image_1_left", "images/cam_high")
    assert "observation/wrist_image_left" in keys["left_wrist_0_rgb"] and keys["left_wrist_0_rgb"][-1].endswith(
        "left_wrist"
    )
    assert keys["right_wrist_0_rgb"][2:] == ("images/cam_right_wrist",)
    assert camera_keys(("front", "side"))["side"][2:] == ("observation/wrist_image", "observation/wrist_image_left")
    assert camera_keys(("side", "front", "wrist"))["front"] == ("images/front", "observation/front")


def test_a_camera_may_be_given_its_key() -> None:
    message = request("aloha")
    plain = read("aloha", message).images["cam_low"]
    given = read("aloha", message, camera_keys={"cam_low": "images/cam_high"}).images["cam_low"]
    np.testing.assert_array_equal(given[0], picture(0, True).transpose(1, 2, 0))
    assert not np.array_equal(plain, given)
    for wrong, what in (({"front": "images/top"}, "no camera 'front'"), ({"cam_low": "top"}, "images/NAME")):
        with pytest.raises(ConfigError, match=what):
            read("aloha", message, camera_keys=wrong)


@pytest.mark.skipif(not OPENPI, reason="set OPENPI=/path/to/openpi, a clone of it, to run its own simple_client")
@pytest.mark.parametrize("robot", ["aloha", "aloha_sim", "droid", "libero", "libero: a network"])
def test_their_own_simple_client_runs(robot: str) -> None:
    robot, _, is_network = robot.partition(":")
    if is_network:
        policy, facts = load_for_serving("pretrained:tabletop_base", ServeConfig(device="cpu"))
        policy.num_embedded = 0  # type: ignore[attr-defined]
    else:
        policy = Remembers(robot)
        facts = facts_of(policy)
    client = Path(OPENPI) / "examples" / "simple_client" / "main.py"
    source = Path(OPENPI) / "packages" / "openpi-client" / "src"
    with served(policy, facts=facts) as port:
        command = [os.environ.get("OPENPI_PYTHON", sys.executable), str(client), "--env", robot.upper()]
        done = subprocess.run(
            [*command, "--host", "127.0.0.1", "--port", str(port), "--num-steps", "3"],
            env={**os.environ, "PYTHONPATH": str(source)},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Timing Statistics" in done.stdout and "server_infer_ms" in done.stdout
