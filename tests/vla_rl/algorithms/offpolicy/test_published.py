"""Only a published policy that is whole and fits acts; any other leaves the one before acting, and is told once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_run import save_policy

from vla_rl.algorithms.offpolicy.published import POINTER, Followed, PublishedError, newest, publish
from vla_rl.interfaces import Policy
from vla_rl.policies.load import load_policy


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> list[Policy]:
    folder = tmp_path_factory.mktemp("policies")
    return [load_policy(save_policy(folder / str(seed), seed)) for seed in range(2)]


def same(policy: Policy, other: Policy) -> bool:
    a, b = policy.state_dict(), other.state_dict()  # type: ignore[attr-defined]
    return all(torch.equal(a[name], b[name]) for name in a)


def test_the_newest_acts_and_old_ones_leave(policies: list[Policy], tmp_path: Path) -> None:
    assert newest(tmp_path / "published") is None
    with pytest.raises(PublishedError, match="no policy is published there; `run: hil`"):
        Followed(tmp_path / "published", lambda *_: None)
    publish(tmp_path / "published", 0, policies[0], 2)
    said: list[str] = []
    followed = Followed(tmp_path / "published", lambda *_: None, tell=said.append)
    assert same(followed.policy, policies[0]) and not followed.look()
    for number in (10, 20):
        publish(tmp_path / "published", number, policies[1], 2)
    assert followed.look() and followed.published.number == 20 and same(followed.policy, policies[1])
    assert sorted(path.name for path in (tmp_path / "published").glob("policy-*")) == [
        "policy-00000010",
        "policy-00000020",
    ]
    assert said == [f"policy-00000020 {followed.published.hash[:12]} acts from here on"]


def _half(folder: Path) -> None:
    file = folder / "policy-00000001" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])


def _one_bit(folder: Path) -> None:
    file = folder / "policy-00000001" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(bytes(data))


def _gone(folder: Path) -> None:
    shutil.rmtree(folder / "policy-00000001")


def _pointer(folder: Path) -> None:
    (folder / POINTER).write_text('{"number": 1, "ha')


def _elsewhere(folder: Path) -> None:
    (folder / POINTER).write_text(json.dumps({"number": "../../other", "hash": "0"}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_half, "half-written or damaged"),
        (_one_bit, "half-written or damaged"),
        (_gone, "policy not found"),
        (_pointer, r"newest\.json: damaged"),
        (_elsewhere, r"newest\.json: damaged"),
    ],
)
def test_what_is_damaged_is_refused_and_the_old_one_goes_on(
    policies: list[Policy], tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    publish(tmp_path, 0, policies[0], 3)
    said: list[str] = []
    followed = Followed(tmp_path, lambda *_: None, tell=said.append)
    publish(tmp_path, 1, policies[1], 3)
    damage(tmp_path)
    assert not followed.look() and not followed.look()
    assert same(followed.policy, policies[0]) and followed.published.number == 0
    [told] = said
    assert "a published policy is refused, policy-00000000" in told and "goes on acting" in told
    with pytest.raises(PublishedError, match=message):
        Followed(tmp_path, lambda *_: None)
    publish(tmp_path, 2, policies[1], 3)
    assert followed.look() and same(followed.policy, policies[1]), "a whole one is taken after a damaged one"


def test_what_does_not_fit_is_refused(policies: list[Policy], tmp_path: Path) -> None:
    def check(policy: Policy, published: object) -> None:
        if policy is not policies[0] and published.number:  # type: ignore[attr-defined]
            raise ValueError("its actions have 7 numbers, the robot's 6")

    publish(tmp_path, 0, policies[0], 3)
    said: list[str] = []
    followed = Followed(tmp_path, check, tell=said.append)
    publish(tmp_path, 1, policies[1], 3)
    assert not followed.look() and same(followed.policy, policies[0])
    assert "does not fit: its actions have 7 numbers, the robot's 6" in said[0]
