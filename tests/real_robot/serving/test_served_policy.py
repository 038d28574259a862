"""A policy that one can only query: its encoder by hand, its requests, what is refused, `run: online` through it."""

from __future__ import annotations

import json
import socket
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reach_policy import ReachPolicy
from served import server_thread
from tiny_run import metrics, save_policy, tiny_values
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import ServerConnection, serve

from real_robot.client_package.vla_rl_client.wire import pack, unpack
from real_robot.serving.requests import PolicyFacts
from real_robot.serving.served_policy import ALIKE, KIND, ServedPolicy, ServedPolicyConfig
from real_robot.serving.server import ServeConfig, load_for_serving
from sim.dummy import DummyConfig
from vla_rl.algorithms.offpolicy.replay import ReplayError
from vla_rl.common.run_folder import open_run
from vla_rl.config import ConfigError
from vla_rl.evaluation.evaluate import EvalConfig, evaluate
from vla_rl.policies.load import load_policy
from vla_rl.recipe.checks import OFFLINE
from vla_rl.recipe.recipe import check, read_recipe
from vla_rl.types import ActionChunk, Observation
from vla_rl.workflows.online import improve_online
from vla_rl.workflows.recipe_parts import policy_version

ENV = DummyConfig.model_validate({"num_envs": 4, "image_size": 32, "horizon": 11, "tasks": ["reach_red"]})
SPEC = ENV.env_spec()
TOKEN = "correct-horse-battery-staple"


class Reach(ReachPolicy):
    """Knows the way to the red square, whatever it is told."""

    def act(self, obs: Observation, generator: Any = None, temperature: float = 1.0) -> ActionChunk:
        return super().act(replace(obs, instruction=["red"] * obs.batch_size), generator, temperature)


@contextmanager
def reach_server(noise: float = 0.0, digest: str = "a" * 64, **options: Any) -> Iterator[str]:
    """The address of a server of a policy that knows the way."""
    facts = PolicyFacts("reach", f"reach {digest[:3]}", ("agentview",), (32, 32), 8, True, 4, 7, policy_hash=digest)
    config = {"temperature": 1.0, "max_batch": 8, **options}
    with server_thread(lambda: (Reach(0.45, noise), facts), **config) as server:
        yield f"127.0.0.1:{server.port}"


@contextmanager
def mute_server(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> Iterator[str]:
    """The address of a server that tells nothing of itself, as openpi's own."""

    def handle(connection: ServerConnection) -> None:
        connection.send(pack({}))
        try:
            while True:
                connection.send(pack(answer(unpack(connection.recv(decode=False)))))
        except ConnectionClosed:
            pass

    with serve(handle, "127.0.0.1", 0) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{listening.socket.getsockname()[1]}"
        finally:
            listening.shutdown()
            thread.join()


def seen(env: DummyConfig, count: int) -> Observation:
    """First observations of so many episodes, all different."""
    rng = np.random.default_rng(0)
    images = {"agentview": rng.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)}
    for row, image in enumerate(images["agentview"]):
        image[row : row + 6, 8:14] = (220, 40, 40)
    instruction = [env.env_spec().tasks["reach_red"]] * count
    return Observation(images, rng.normal(0, 0.3, (count, 8)).astype(np.float32), instruction)


def test_its_encoder_by_hand() -> None:
    sizes = {"cameras": ("top",), "state_dim": 2, "chunk_size": 1, "action_dim": 1}
    policy = ServedPolicy(ServedPolicyConfig(pixels=2), sizes)
    image = np.zeros((2, 4, 4, 3), np.uint8)
    image[0, :2, 2:] = (255, 51, 0)  # The upper right quarter.
    image[1, 3, 0, 2] = 204  # One of the four pixels of the lower left one, in blue.
    texts = ["push the cube", "lift it"]
    found = policy.embed(Observation({"top": image}, np.array([[1, 2], [3, 4]], np.float32), texts))
    assert found.shape == (2, 3 * 4 + 2 + 32) and found.dtype == torch.float32
    # By channel, then row by row: red, green, blue of upper left, upper right, lower left, lower right.
    np.testing.assert_allclose(found[0, :12], [0, 1, 0, 0, 0, 0.2, 0, 0, 0, 0, 0, 0], atol=1e-6)
    np.testing.assert_allclose(found[1, :12], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0.2, 0], atol=1e-6)
    assert found[:, 12:14].tolist() == [[1, 2], [3, 4]]
    for row, text in enumerate(texts):
        assert found[row, 14:].nonzero().flatten().tolist() == [zlib.crc32(text.encode()) % 32]


def test_what_a_request_holds() -> None:
    cameras = ("agentview", "wrist", "side")
    images = {camera: np.full((1, 2, 2, 3), i, np.uint8) for i, camera in enumerate(cameras)}
    obs = Observation(images, np.arange(8, dtype=np.float32)[None], ["go"])
    plain = ServedPolicyConfig()
    request = plain.request(obs, 0, plain.keys_of(cameras))
    assert list(request) == [
        *("prompt", "observation/state", "observation/image", "observation/wrist_image", "observation/side")
    ]
    assert request["prompt"] == "go" and request["observation/state"].tolist() == [*range(8)]
    assert request["observation/wrist_image"].max() == 1

    names = {"agentview": "observation/exterior_image_1_left", "wrist": "images/cam_low"}
    parts = {"observation/joint_position": 7, "observation/gripper_position": 1}
    droid = ServedPolicyConfig(camera_keys=names, state_keys=parts)
    request = droid.request(obs, 0, droid.keys_of(cameras[:2]))
    assert request["observation/joint_position"].tolist() == [*range(7)]
    assert request["observation/gripper_position"].tolist() == [7]
    assert request["images"]["cam_low"].max() == 1 and "observation/exterior_image_1_left" in request
    with pytest.raises(ConfigError, match=r"policy.camera_keys: no camera 'side'; sent are agentview"):
        ServedPolicyConfig(camera_keys={"side": "images/a"}).keys_of(cameras[:1])
    with pytest.raises(ConfigError, match=r"policy.state_keys: .* hold 3 numbers, and the state has 8"):
        ServedPolicyConfig(state_keys={"state": 3}).request(obs, 0, {})


def test_it_acts_as_the_policy_served_row_by_row() -> None:
    obs = seen(ENV, 11)
    with reach_server() as address:
        policy = ServedPolicyConfig(address=address, connections=3).build(SPEC)
        assert (policy.chunk_size, policy.action_dim, policy.cameras) == (4, 7, ("agentview",))
        np.testing.assert_array_equal(policy.act(obs).actions, ReachPolicy(0.45).act(obs).actions)
        two = ServedPolicyConfig(address=address, chunk_size=2).build(SPEC)
        np.testing.assert_array_equal(two.act(obs).actions, ReachPolicy(0.45).act(obs).actions[:, :2])
        with pytest.raises(ConfigError, match=r"policy.chunk_size: got 5, but .* answers with 4 actions"):
            ServedPolicyConfig(address=address, chunk_size=5).build(SPEC)
    with reach_server(noise=0.3) as address:
        policy = ServedPolicyConfig(address=address).build(SPEC)
        features, chunks = policy.embed_and_draw(obs, 3, None, 1.0)
    assert features.shape == (11, 4 * 4 * 3 + 8 + 32) and chunks.shape == (11, 3, 4, 7)
    mean = ReachPolicy(0.45).act(obs).actions
    assert np.abs(chunks[..., :2].std(1)).mean() > 0.1 and np.abs(chunks - mean[:, None]).max() < 2


def test_a_server_that_tells_nothing_is_asked_for_its_sizes() -> None:
    def answer(request: dict[str, Any]) -> dict[str, Any]:
        assert request["top"].shape == (32, 32, 3)
        return {"actions": np.tile(request["state"][:7], (3, 1)), "server_timing": {}}

    obs = seen(ENV, 2)
    options = {"camera_keys": {"agentview": "top"}, "state_keys": {"state": 8}}
    with mute_server(answer) as address:
        policy = ServedPolicyConfig(address=address, **options).build(SPEC)
        assert (policy.chunk_size, policy.action_dim) == (3, 7)
        np.testing.assert_array_equal(policy.act(obs).actions[:, 2], obs.state[:, :7])
        assert not policy.identity.is_known and "unknown policy" in policy.source


def test_what_is_wrong_is_told_by_its_option(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(ConfigError, match=r"policy.address: no policy server at .* Is `vla-rl serve` running"):
            ServedPolicyConfig(address=f"127.0.0.1:{taken.getsockname()[1]}").build(SPEC)
    with pytest.raises(ConfigError, match=r"policy.address: policy server 'http://a': http:// is not spoken"):
        ServedPolicyConfig(address="http://a").build(SPEC)
    with pytest.raises(ConfigError, match=r"policy.token_file: token file .* cannot be read"):
        ServedPolicyConfig(token_file=tmp_path / "none").build(SPEC)
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text("another-word-of-some-length")
    with reach_server(token=TOKEN) as address:
        with pytest.raises(ConfigError, match=r"policy.token_file: .* refused the connection \(401\)"):
            ServedPolicyConfig(address=address, token_file=token).build(SPEC)
        token.write_text(TOKEN)
        given = ServedPolicyConfig(address=address, token_file=token, connections=1).build(SPEC)
        given.save(tmp_path / "saved")
        assert TOKEN not in (tmp_path / "saved" / "config.json").read_text()
    with reach_server() as address:
        with pytest.raises(ConfigError, match=r"camera_keys .*no image of camera 'agentview'"):
            ServedPolicyConfig(address=address, camera_keys={"agentview": "observation/top"}).build(SPEC)
        with pytest.raises(ConfigError, match=r"policy.cameras: \['wrist'\] not in environment"):
            ServedPolicyConfig(address=address, cameras=("wrist",)).build(SPEC)
    six = mute_server(lambda _: {"actions": np.zeros((2, 6))})
    with six as address, pytest.raises(ConfigError, match="policy action_dim: the policy has 6"):
        ServedPolicyConfig(address=address).build(SPEC)


def test_answers_of_another_policy_or_of_none_that_samples_are_refused(tmp_path: Path) -> None:
    obs = seen(ENV, ALIKE // 2)
    with reach_server() as address:
        policy = ServedPolicyConfig(address=address).build(SPEC)
        policy.save(tmp_path)
        policy.embed_and_draw(obs, 2, None, 1.0)
        with pytest.raises(ConfigError, match=f"the same chunk 2 times at each of {ALIKE} observations.*--temperature"):
            policy.embed_and_draw(obs, 2, None, 1.0)
    with reach_server(digest="b" * 64) as elsewhere:
        moved = ServedPolicyConfig(path=str(tmp_path), address=elsewhere).build(SPEC)
        with pytest.raises(
            ConfigError, match=r"policy.address: the server now answers as reach bbb, before as reach aaa"
        ):
            moved.act(obs)
    with reach_server(noise=0.3) as elsewhere:
        again = ServedPolicyConfig(path=str(tmp_path), address=elsewhere).build(SPEC)
        assert again.act(obs).actions.shape == (ALIKE // 2, 4, 7) and again.source == policy.source


def recipe_of(address: str, run: str = "online", **policy: Any) -> Any:
    values = tiny_values(Path("none"), f"run={run}")
    values["env"] |= {"horizon": 11, "num_envs": 4}
    values["policy"] = {"kind": KIND, "address": address, "pixels": 4, **policy}
    online = {"rounds": 2, "episodes_per_round": 4, "updates_per_round": 3, "candidates": 3, "prior": "none"}
    online |= {"warm_updates": 0, "critic": {"hidden": 8, "batch_size": 16, "members": 2}, "evaluate": "after"}
    sections = {"online": online} if run == "online" else {"offline": {"kind": "best_of_n"}, "sft": {"datasets": ["d"]}}
    return read_recipe(values | sections)


def test_online_improves_it_and_what_is_saved_acts_and_is_served(tmp_path: Path) -> None:
    folder, encoder = tmp_path / "run", save_policy(tmp_path / "encoder")
    with reach_server(noise=0.5) as address:
        recipe = recipe_of(address)
        improve_online(recipe, open_run(recipe, folder, False), lambda _: None)
        assert [row["rollout/episodes"] for row in metrics(folder)] == [4, 8]
        assert json.loads((folder / "evaluations" / "final.json").read_text())["meta"]["policy_hash"]
        assert policy_version(recipe) == f"served at {address}"

        policy, _ = load_for_serving(str(folder / "policy"), ServeConfig())
        assert policy.act(seen(ENV, 2)).actions.shape == (2, 4, 7)
        found = evaluate(policy, ENV, EvalConfig(split="train", episodes_per_task=3, temperatures=(1.0,)))
        assert len(found.episodes) == 3

        with pytest.raises(ReplayError, match="holds what another policy"):  # The features are another encoder's.
            other = recipe_of(address, encoder=str(encoder))
            improve_online(other, folder, lambda _: None)

        coded = recipe_of(address, encoder=str(encoder))
        improve_online(coded, open_run(coded, tmp_path / "coded", False), lambda _: None)
        improved, obs = load_policy(tmp_path / "coded" / "policy"), seen(ENV, 2)
        assert torch.equal(improved.embed(obs), load_policy(encoder).embed(obs))


def test_what_needs_weights_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"policy.path: the run improves a checkpoint"):
        check(recipe_of("127.0.0.1:1", run="offline"), OFFLINE)
    policy = ServedPolicy(
        ServedPolicyConfig(), dict.fromkeys(("state_dim", "chunk_size", "action_dim"), 1) | {"cameras": ()}
    )
    with pytest.raises(NotImplementedError, match="run: online"):
        policy.bc_loss(seen(ENV, 1), np.zeros((1, 4, 7)))
