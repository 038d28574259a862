"""Does the device compute what the CPU computes? Policies and learners of every kind, tiny, with the same weights."""

from __future__ import annotations

from vla_rl.workflows.gpu_bench import learner_matrix, policy_matrix
from vla_rl.workflows.gpu_bench.record import Target
from vla_rl.workflows.gpu_bench.sheet import Attempt, LeftOutError, Sheet
from vla_rl.workflows.gpu_bench.timing import exact_float32

FLOAT32, BFLOAT16 = 1e-3, 0.1  # Largest difference that is allowed.
TINY = ("openvla-lora", "grpo")


def measure(sheet: Sheet) -> None:
    """Each figure is the largest difference from the CPU; a large one makes the benchmark fail."""
    policies = [name for name in policy_matrix.ON_DEVICES if sheet.is_full or name in TINY]
    learners = [name for name in learner_matrix.CASES if sheet.is_full or name in TINY]
    attempts: list[Attempt] = [(f"policy {name}", lambda name=name: _policy(sheet, name)) for name in policies]
    attempts += [(f"learner {name}", lambda name=name: _learner(sheet, name)) for name in learners]
    sheet.run(attempts)


def _target(in_bf16: bool) -> Target:
    return Target(BFLOAT16 if in_bf16 else FLOAT32, required=True)


def _policy(sheet: Sheet, name: str) -> None:
    _check_packages(policy_matrix.ON_DEVICES[name])
    in_bf16 = policy_matrix.computes_in_bf16(name)
    with exact_float32():
        here, there = (policy_matrix.build(name, device) for device in (sheet.device, "cpu"))
        for question, ask in policy_matrix.QUESTIONS.items():
            gap = policy_matrix.difference(ask(here), ask(there), drawn_alike=not in_bf16)
            sheet.add(f"{name}: {question}", gap, "from the CPU", _target(in_bf16))


def _learner(sheet: Sheet, name: str) -> None:
    _check_packages(learner_matrix.CASES[name][0])
    with exact_float32():
        (policy, learner), (reference, other) = (learner_matrix.build(name, device) for device in (sheet.device, "cpu"))
        episodes = learner_matrix.episodes(reference)
        found = learner_matrix.two_updates(policy, learner, episodes)
        gap = learner_matrix.difference(found, learner_matrix.two_updates(reference, other, episodes))
    sheet.add(f"{name}: two updates", gap, "from the CPU", _target(learner_matrix.computes_in_bf16(name)))


def _check_packages(policy: dict[str, object]) -> None:
    if policy["kind"] == "lerobot":
        try:
            import lerobot  # noqa: F401
        except ImportError:
            raise LeftOutError("needs the package lerobot") from None
        if policy.get("type") == "smolvla":
            import num2words  # noqa: F401
