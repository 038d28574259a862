"""Another policy takes the place of the one that is served only between episodes, whole, and of the same sizes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_run import save_policy
from toy_server import ToyPolicy

from real_robot.serving import hot_swap
from real_robot.serving.engine import Answer, InferenceEngine
from real_robot.serving.hot_swap import HotSwap
from real_robot.serving.requests import PolicyFacts, Request
from real_robot.serving.server import ServeConfig
from vla_rl.algorithms.offpolicy.published import publish
from vla_rl.policies.load import load_policy
from vla_rl.types import ActionChunk, Observation

FACTS = PolicyFacts("toys", "one", ("agentview",), (8, 8), 5, True, 4, 3, policy_hash="1" * 64)
SECOND = replace(FACTS, checkpoint="others", version="two", policy_hash="2" * 64)


class Turned(ToyPolicy):
    """Answers the negative of what the toy policy does."""

    def act(self, obs: Observation, generator: Any = None, temperature: float = 1.0) -> ActionChunk:
        return ActionChunk(-super().act(obs).actions)


class Broken(ToyPolicy):
    def act(self, obs: Observation, generator: Any = None, temperature: float = 1.0) -> ActionChunk:
        return ActionChunk(np.full((obs.batch_size, 4, 3), np.nan, np.float32))


@pytest.fixture
def engine() -> Iterator[InferenceEngine]:
    made = InferenceEngine(lambda: (ToyPolicy(), FACTS), max_batch=2)
    made.ready.result(60)
    yield made
    made.close()


def ask(engine: InferenceEngine) -> Answer:
    images = {"agentview": np.zeros((1, 8, 8, 3), np.uint8)}
    return engine.submit(Request(Observation(images, np.full((1, 5), 2, np.float32), ["go"]))).result(60)


def test_another_policy_acts_once_nothing_was_asked_for_a_while(engine: InferenceEngine) -> None:
    ask(engine)
    engine.offer(Turned(), SECOND, idle=1e6)
    answer = ask(engine)
    assert answer.policy == FACTS.identity and answer.actions[0, 0] == 2, "an episode is under way"
    engine.offer(Turned(), SECOND, idle=0)
    answer = ask(engine)
    assert answer.policy == SECOND.identity and answer.actions[0, 0] == -2
    assert engine.facts == SECOND, "what the next client is told"


@pytest.mark.parametrize(
    ("policy", "facts", "message"),
    [
        (Broken(), SECOND, "NaN among them"),
        (Turned(), replace(SECOND, action_dim=2), "its action_dim is 2, that of the policy served 3; restart"),
        (Turned(), replace(SECOND, cameras=("agentview", "wrist")), "its cameras is"),
        (Turned(), replace(SECOND, chunk_size=8), "its chunk_size is 8"),
    ],
)
def test_one_that_is_broken_or_of_other_sizes_never_acts(
    engine: InferenceEngine, policy: ToyPolicy, facts: PolicyFacts, message: str
) -> None:
    with pytest.raises((ValueError, RuntimeError), match=message):
        engine.offer(policy, facts, idle=0)
    assert ask(engine).policy == FACTS.identity


def test_it_waits_for_the_first_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A learner that first fits its critic to logged episodes publishes minutes after the server was started."""
    monkeypatch.setattr(hot_swap, "LOOK_EVERY", 0.01)
    folder, said = tmp_path / "published", []
    told = threading.Event()
    made = HotSwap(folder, ServeConfig(device="cpu"), lambda text: (said.append(text), told.set()))
    with ThreadPoolExecutor(1) as pool:
        loaded = pool.submit(made.load)
        assert told.wait(60) and not loaded.done()
        publish(folder, 0, load_policy(save_policy(tmp_path / "base")), 2)
        _, facts = loaded.result(60)
    assert facts.version.startswith("policy-00000000 ")
    assert said == [f"waiting for the first policy in {folder}; `run: hil` publishes one when it begins"]
