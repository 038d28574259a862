"""A robot that a failure detector watches: real server, client, loop, intervention and detector, ticked by hand.

The robot is a point (`console_robot.PointRobot`). Its policy goes forward, or sideways when `astray`; embeddings are
where the robot is. The detector is FLOAT, fitted on episodes that go forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from console_robot import PATIENT, RATE, PointRobot
from memory_transport import MemoryTransport
from served import PATIENCE, server_thread

from real_robot.bridge.robot import TopicRobot
from real_robot.contract.load import load_contract
from real_robot.control.chunk_executor import ChunkExecutor
from real_robot.control.playback import SynchronousActions
from real_robot.control.robot_loop import ControlLoop, Tick
from real_robot.control.supervisor import Supervisor
from real_robot.failure.conformal import FailureConfig
from real_robot.failure.detector import FailureDetector, fit
from real_robot.failure.watch import DetectorThread, FailureWatch, load_detector
from real_robot.operator.console.operator import ConsoleState
from real_robot.operator.intervention import Intervention
from real_robot.operator.operators import Operators
from real_robot.serving.client import PolicyClient
from real_robot.serving.requests import PolicyFacts
from vla_rl.data.embeddings import EmbeddedEpisodes
from vla_rl.interfaces import Policy
from vla_rl.types import ActionChunk, Observation

CHUNK = 4  # Actions; also the control steps from one embedding to the next.
SPEED = 0.1  # m/s
HASH = "5" * 64


class Walker(Policy):
    """A policy of numpy alone."""

    def __init__(self) -> None:
        self.astray = False
        self.num_embedded = 0

    def act(self, obs: Observation, generator: Any = None, temperature: float = 0.0) -> ActionChunk:
        actions = np.zeros((obs.batch_size, CHUNK, 7), np.float32)
        actions[..., 1 if self.astray else 0] = SPEED
        actions[..., 6] = -1
        return ActionChunk(actions)

    def embed(self, obs: Observation) -> Any:
        self.num_embedded += obs.batch_size
        return embedding(obs.state[:, :2])


def embedding(position: np.ndarray) -> np.ndarray:
    """float32 (..., 4) of a position (..., 2), meters."""
    return np.concatenate([position, np.ones((*position.shape[:-1], 2))], axis=-1).astype(np.float32)


def walks(num: int, seed: int) -> EmbeddedEpisodes:
    """Episodes that go forward, each a little beside the line; all succeed."""
    rng = np.random.default_rng(seed)
    counts = np.full(num, 12, np.int64)
    x = np.maximum(0, np.arange(12) * CHUNK - 1) * SPEED / RATE  # The robot moves a tick after it is told to.
    path = np.stack([np.broadcast_to(x, (num, 12)), np.zeros((num, 12))], axis=-1)
    path = path + rng.normal(0, 0.004, (num, 12, 2))
    return EmbeddedEpisodes(
        embeddings=embedding(path).reshape(-1, 4),
        actions=np.zeros((12 * num, CHUNK, 7), np.float32),
        counts=counts,
        num_steps=CHUNK * counts,
        success=np.ones(num, bool),
        instructions=tuple("go forward" for _ in range(num)),
        tasks=tuple("go" for _ in range(num)),
        initial_states=tuple(f"go/train/{1000 * seed + i}" for i in range(num)),
        every=CHUNK,
        policy_hash=HASH,
    )


def fitted(folder: Path) -> Path:
    """The folder of the detector."""
    config = FailureConfig(alpha=0.01, detectors=("float_ot",), band="centered")
    return fit(config, walks(20, 1), walks(300, 2), folder, policy_name="walker")[0]


@contextmanager
def served(
    policy: Any, policy_hash: str = HASH, can_embed: bool = True, port: int = 0, facts: PolicyFacts | None = None
) -> Iterator[int]:
    """The policy behind a real server, in a thread; gives the port. `facts`: in place of the Walker's."""
    facts = facts or PolicyFacts(
        *("walker", "walker 1", ("agentview",), (32, 32), 8, True, CHUNK, 7),
        can_embed=can_embed,
        policy_hash=policy_hash,
    )
    with server_thread(lambda: (policy, facts), port=port) as server:
        policy.num_embedded = 0  # The warm-up's.
        yield server.port


class WatchBench:
    """See the module."""

    def __init__(
        self, folder: Path, port: int, stack: ExitStack, *overrides: str, scorer: Any = None, asynchronous: bool = False
    ) -> None:
        contract = load_contract("sim_robot", [*PATIENT, "safety.workspace.high=[0.4, 0.3, 0.34]", *overrides])
        transport = MemoryTransport()
        self.robot = PointRobot(transport)
        robot = TopicRobot(contract, transport, "go forward")
        self.client = PolicyClient(f"127.0.0.1:{port}", infer_timeout=PATIENCE, retry_after=0).connect()
        stack.callback(self.client.close)
        self.detector: FailureDetector = load_detector(folder, self.client.address, self.client.metadata)
        if scorer is not None:
            self.detector.scorer = scorer
        self.thread = stack.enter_context(DetectorThread(self.detector))
        self.told: list[str] = []
        self.console_state = ConsoleState(contract, self.detector.kind)
        self.intervention = Intervention([d.kind for d in contract.safety.dimensions])
        self.watch = FailureWatch(
            self.thread,
            self.detector.identity.every,
            self.detector.identity.policy_hash,
            self.client.act,
            lambda: self.client.metadata,
            self.intervention,
            contract.failure,
            self.console_state.score,
            self.told.append,
        )
        inner = (
            ChunkExecutor(self.watch.infer, contract.execution)
            if asynchronous
            else SynchronousActions(self.watch.infer)
        )
        actions = self.watch.around(inner)
        stack.callback(actions.close)
        self.ticks: list[Tick] = []
        self.loop = ControlLoop(
            robot,
            actions,
            Supervisor(contract.safety),
            Operators([self.intervention]),
            pacer=None,  # type: ignore[arg-type]
            needs_new=True,
            silence=contract.silence,
            observers=[self.intervention, self.watch, self.console_state],
        )

    def tick(self, count: int = 1, wait: bool = True) -> Tick:
        """The robot moves and shows itself, the loop ticks; then the detector is waited for, or not."""
        for _ in range(count):
            self.robot.position += self.robot.twist / RATE
            self.robot.publish()
            self.ticks.append(self.loop.tick())
            if wait:
                assert self.thread.wait(PATIENCE)
        return self.ticks[-1]

    def walk(self, steps: int) -> None:
        """Until the policy has driven so many steps more."""
        until = self.loop.step + steps
        while self.loop.step < until:
            assert self.intervention.state == "autonomous", self.told
            self.tick()

    def run_until(self, state: str, limit: int = 100) -> None:
        for _ in range(limit):
            if self.intervention.state == state:
                return
            self.tick()
        raise AssertionError(f"{self.intervention.state} after {limit} ticks; scores {self.scores()}; {self.told}")

    def scores(self) -> list[tuple[float, float]]:
        """(score, threshold) of all that the console was shown."""
        return [(value, limit) for _, _, value, limit in self.console_state.scores(0)]


@contextmanager
def watch_bench(folder: Path, policy: Walker, *overrides: str, **options: Any) -> Iterator[WatchBench]:
    """Everything, begun."""
    with served(policy) as port, ExitStack() as stack:
        bench = WatchBench(folder, port, stack, *overrides, **options)
        bench.intervention.begin("anna")
        yield bench
