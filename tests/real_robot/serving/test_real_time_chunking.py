"""Real-time chunking over a real websocket: a policy of two minds, slow, and an action stream that stays with one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("lerobot.policies.rtc.modeling_rtc", reason="lerobot is not installed: pip install '.[lerobot]'")

from virtual_time import VirtualTime  # noqa: E402
from watch_bench import PATIENCE, served  # noqa: E402

from real_robot.client_package.vla_rl_client import PolicyClientError  # noqa: E402
from real_robot.contract.load import load_contract  # noqa: E402
from real_robot.contract.safety import SafetyConfig  # noqa: E402
from real_robot.control.chunk_executor import ChunkExecutor  # noqa: E402
from real_robot.control.supervisor import Supervisor  # noqa: E402
from real_robot.deploy.deploy import DeployOptions, check_fit, deploy  # noqa: E402
from real_robot.serving.client import PolicyClient  # noqa: E402
from real_robot.serving.requests import PolicyFacts  # noqa: E402
from real_robot.serving.server import ServeConfig, load_for_serving, policy_facts  # noqa: E402
from real_robot.types import RobotObservation  # noqa: E402
from vla_rl.config import ConfigError, validate  # noqa: E402
from vla_rl.interfaces import Policy  # noqa: E402
from vla_rl.policies.fake_input import fake_env_spec, fake_observation, fake_statistics  # noqa: E402
from vla_rl.policies.lerobot import flow, flow_sampling  # noqa: E402
from vla_rl.policies.lerobot.config import LeRobotConfig  # noqa: E402
from vla_rl.policies.lerobot.options import FlowSampling  # noqa: E402
from vla_rl.types import ActionChunk, ActionPrefix, Observation  # noqa: E402

HZ, CHUNK, MODE, DEVIATION = 25.0, 32, 0.5, 0.02
FACTS = PolicyFacts("bimodal", "bimodal 1", (), None, 1, True, CHUNK, 1, can_embed=False, can_continue=True)


class Bimodal(Policy):
    """The exact flow of two ways to go on, 0.5 above and 0.5 below a sine; which of them is for the noise to say.

    The state is the control step.
    """

    chunk_size, action_dim, cameras, uses_state, state_dim = CHUNK, 1, (), True, 1

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.prefixes: list[ActionPrefix] = []

    def _chunk(self, obs: Observation, prefix: ActionPrefix | None) -> ActionChunk:
        step = torch.from_numpy(obs.state[:, :1]) + torch.arange(CHUNK)
        modes = [(torch.sin(step / 10) * 0.3 + sign * MODE)[..., None] for sign in (-1, 1)]

        def own(x: Any, level: Any) -> tuple[Any, None]:
            t = level[:, None, None]
            variance = ((1 - t) * DEVIATION) ** 2 + t**2
            far = torch.stack([((x - (1 - t) * m) ** 2 / (2 * variance)).sum((1, 2)) for m in modes])
            speed = [(t - (1 - t) * DEVIATION**2) / variance * (x - (1 - t) * m) - m for m in modes]
            return sum(w[:, None, None] * v for w, v in zip((-far).softmax(0), speed, strict=True)), None

        velocity: flow_sampling.Velocity = own
        if prefix is not None:
            config = flow.rtc_config(prefix, None)
            rest = torch.from_numpy(prefix.actions)
            shape = torch.Size((obs.batch_size, CHUNK, 1))
            velocity = flow.guided(own, flow.as_underway(rest, prefix.num_frozen, config, shape))
        noise = flow_sampling.normal((obs.batch_size, CHUNK, 1), self.generator, torch.device("cpu"))
        return ActionChunk(flow_sampling.denoise(velocity, noise, 10, FlowSampling(), None).x.numpy())

    def act(self, obs: Observation, generator: Any = None, temperature: float = 1.0) -> ActionChunk:
        return self._chunk(obs, None)

    def act_with_prefix(self, obs: Observation, prefix: ActionPrefix, generator: Any = None) -> ActionChunk:
        self.prefixes.append(prefix)
        return self._chunk(obs, prefix)


LIMITS = {"low": -2.0, "high": 2.0, "max_velocity": 1.0, "state": 0}


@pytest.fixture
def clock(virtual: VirtualTime, monkeypatch: pytest.MonkeyPatch) -> VirtualTime:
    """Of the robot's side; the connection and the server are real."""
    virtual.install(monkeypatch, "real_robot.control.chunk_executor", "real_robot.control.supervisor")
    return virtual


def stream(
    clock: VirtualTime, policy: Bimodal, steps: int, delay: float, **options: Any
) -> tuple[list[float | None], list[float]]:
    """What the executor asks for at each step, and what the supervisor sends. Each chunk takes `delay` seconds."""
    contract = load_contract("sim_robot", [f"rate={HZ}"])
    execution = contract.execution.model_copy(update={"kind": "position", "refill_at": None, "max_age": PATIENCE})
    execution = type(execution).model_validate({**execution.model_dump(), "blend_steps": 0, **options})
    dimension = {"name": "x", "kind": "position", **LIMITS}
    patient = {"observation_timeout": PATIENCE, "command_timeout": PATIENCE}
    supervisor = Supervisor(validate(SafetyConfig, {"control_hz": HZ, "dimensions": [dimension], **patient}))
    asked: list[float | None] = []
    sent: list[float] = []
    with served(policy, facts=FACTS) as port, PolicyClient(f"127.0.0.1:{port}", infer_timeout=PATIENCE) as client:

        def infer(observation: RobotObservation, *prefix: Any, **prefixed: Any) -> np.ndarray:
            chunk = client.act(observation, *prefix, **prefixed)["actions"]
            clock.sleep(delay)
            return chunk

        policy.prefixes.clear()  # the warm-up's
        run = ChunkExecutor(infer, execution)
        step = 0
        while step < steps:
            at = np.array([step], np.float32)
            run.submit(RobotObservation({}, at, "go", clock.now), step)
            command = run.next_action(step)
            if command is not None or step:
                asked.append(None if command is None else float(command.values[0]))
                place = np.array(sent[-1:] or [0.0], np.float32)
                supervisor.observe(RobotObservation({}, place, "go", clock.now))
                said = supervisor.filter(command).values
                assert said is not None
                sent.append(float(said[0]))
                step += 1
            clock.sleep(1 / HZ)
        assert run.statistics().error == "" and run.statistics().num_chunks > 3
        run.close()
    return asked, sent


@pytest.mark.parametrize("smooth", [True, False])
def test_a_slow_policy_of_two_minds_keeps_to_one(clock: VirtualTime, smooth: bool) -> None:
    policy = Bimodal()
    asked, sent = stream(clock, policy, 60, 0.11, real_time_chunking=smooth)
    assert None not in asked, "the stream has no gap"
    jump = np.abs(np.diff(np.array(asked, float))).max()
    own = 0.3 / 10  # the sine's largest change in a step
    if smooth:
        assert jump < own + 8 * DEVIATION, "it never changes its mind"
        frozen = {prefix.num_frozen for prefix in policy.prefixes}
        assert 3 in frozen <= {3, 4}, "0.11 s, and less than a step before, are 3 steps or 4"
        assert all(p.prefix_attention_schedule is None for p in policy.prefixes)
    else:
        assert jump > MODE and not policy.prefixes
    assert np.abs(np.diff(sent)).max() <= 1.0 / HZ + 1e-5, "limits come last, whatever the chunks say"


def test_the_contracts_options_reach_the_policy(clock: VirtualTime) -> None:
    policy = Bimodal()
    told = {"execution_horizon": 7, "max_guidance_weight": 2.5, "prefix_attention_schedule": "EXP"}
    stream(clock, policy, 12, 0.0, real_time_chunking=told)
    assert {name: getattr(policy.prefixes[-1], name) for name in told} == told


def test_a_smolvla_is_served_with_it(tmp_path: Path) -> None:
    """A saved checkpoint of SmolVLA's architecture, over the wire: the prefix in the environment's units."""
    pytest.importorskip("num2words", reason="SmolVLA's processor needs it: install '.[flow]'")
    spec = fake_env_spec()
    policy: Any = LeRobotConfig(type="smolvla", preset="tiny").build(spec)
    policy.set_norm_stats(fake_statistics(7), fake_statistics(8, gripper=False))
    policy.save(tmp_path / "policy")
    loaded, facts = load_for_serving(str(tmp_path / "policy"), ServeConfig(device="cpu"))
    assert (facts.image_size, facts.state_dim) == (None, 8), "it resizes images itself"
    obs = fake_observation(spec, 1)
    rest = np.linspace(-0.8, 0.8, 6 * 7, dtype=np.float32).reshape(6, 7)
    seen = RobotObservation({c: i[0] for c, i in obs.images.items()}, obs.state[0], obs.instruction[0], 0.0)
    told: dict[str, Any] = {"execution_horizon": 4, "prefix_attention_schedule": "ONES"}
    with served(loaded, facts=facts) as port, PolicyClient(f"127.0.0.1:{port}", infer_timeout=PATIENCE) as client:
        assert client.metadata["real_time_chunking"] is True
        actions = client.act(seen, rest, 2, guidance=told)["actions"]
        free = client.act(seen)["actions"]
    expected = policy.act_with_prefix(obs, ActionPrefix(rest[None], 2, **told)).actions[0]
    np.testing.assert_allclose(actions, expected, atol=1e-6)
    assert np.abs(actions[:4] - rest[:4]).max() < 0.1 < np.abs(free[:4] - rest[:4]).max()


NAMES = ("x", "y", "z", "turn_x", "turn_y", "turn_z", "gripper")


def metadata(**changes: Any) -> dict[str, Any]:
    return {"cameras": ["agentview"], "action_dim": 7, "state_dim": 8, "uses_state": True, **changes}


def test_a_policy_that_cannot_go_on_is_refused_where_the_contract_asks_for_it() -> None:
    plain = ["execution.refill_at=null"]
    contract = load_contract("sim_robot", [*plain, "execution.real_time_chunking=true"])
    check_fit(contract, metadata(real_time_chunking=True))
    with pytest.raises(PolicyClientError, match=r"execution\.real_time_chunking: .* served at temperature 0"):
        check_fit(contract, metadata(real_time_chunking=False))
    for off in (plain, [*plain, "execution.real_time_chunking=false"]):
        check_fit(load_contract("sim_robot", off), metadata())
    able = [policy_facts(Bimodal(), "x", "x", "", ServeConfig(temperature=t)).can_continue for t in (0.0, 1.0)]
    assert able == [True, False], "a chunk with a likelihood is not guided"


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"control_hz": 10.0}, r"trained at 10 steps a second .* rate is 20, .* set rate=10"),
        ({"action_names": ["y", "x", *NAMES[2:]]}, r"actions are y, x, z, .* in another order: x, y, z"),
        ({"action_names": list(NAMES), "control_hz": 20.0}, None),
        ({"action_names": list("abcdefg"), "control_hz": None}, None),
    ],
)
def test_what_a_server_tells_of_rate_and_order_is_heeded(told: dict[str, Any], message: str | None) -> None:
    contract = load_contract("sim_robot")
    if message is None:
        check_fit(contract, metadata(**told))
    else:
        with pytest.raises(PolicyClientError, match=message):
            check_fit(contract, metadata(**told))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["execution.real_time_chunking=true"], r"execution\.refill_at: 0 asks when nothing is under way"),
        (
            ["execution.refill_at=4", "execution.ensemble=0.1", "execution.real_time_chunking={}"],
            r"execution\.ensemble",
        ),
        (["execution.real_time_chunking.prefix_attention_schedule=linear"], "'LINEAR'"),
    ],
)
def test_options_that_contradict_it_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_contract("sim_robot", overrides)


def test_synchronous_chunks_leave_nothing_to_go_on_from() -> None:
    asked = ("execution.refill_at=8", "execution.real_time_chunking=true")
    with pytest.raises(ConfigError, match="--synchronous"):
        deploy(DeployOptions("sim_robot", asked, instruction="go", synchronous=True), print)
