"""On-policy distillation: the loss by hand, its gradient that of the reverse KL, a student that becomes the teacher."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from toy_problem import ToyPolicy, observation, roll_out

from vla_rl.config import ConfigError, build_component
from vla_rl.interfaces import PolicyOutput
from vla_rl.methods.algo import distill
from vla_rl.methods.algo.distill import DistillConfig, check_same_tokens

TARGETS = observation(np.array([[0.0, 1.0], [0.0, -1.0], [0.5, 1.0]]))


def config(**options) -> DistillConfig:
    made = build_component("algo", {"kind": "distill", "teacher": "teacher", "optim": {"lr": 1e-2}} | options)
    assert isinstance(made, DistillConfig)
    return made


def test_the_loss_by_hand():
    log_prob = torch.tensor([[[-1.0], [-2.0]], [[-0.5], [-3.0]]], requires_grad=True)
    teacher = np.array([[[-2.0], [-2.5]], [[-1.5], [9.0]]], np.float32)
    weight = np.array([[0.25, 0.25], [0.5, 0.0]])
    batch = SimpleNamespace(reference_log_prob=teacher)
    out = PolicyOutput(log_prob, torch.zeros(2, 2, 1))
    loss, metrics = config().loss(batch, np.arange(2), weight, out, num_rows=2, only_critic=False)
    loss.backward()
    # Gaps 1, 0.5, 1: (0.25 * 1 + 0.25 * 0.25 + 0.5 * 1) / 2; the action of weight 0 counts nothing.
    assert loss.item() == pytest.approx(0.40625)
    assert metrics["reverse_kl"].item() == pytest.approx(0.25 + 0.125 + 0.5)
    assert log_prob.grad.flatten().tolist() == pytest.approx([0.25, 0.125, 0.5, 0.0])


def test_its_expected_gradient_is_that_of_the_reverse_kl():
    logits = torch.tensor([0.3, -0.2, 1.0], requires_grad=True)
    teacher = torch.tensor([1.0, 0.0, -0.5]).log_softmax(-1)
    log_prob = logits.log_softmax(-1)
    kl = (log_prob.exp() * (log_prob - teacher)).sum()
    expected = torch.autograd.grad(kl, logits, retain_graph=True)[0]
    batch = SimpleNamespace(reference_log_prob=teacher.numpy()[:, None, None])
    out = PolicyOutput(log_prob[:, None, None], torch.zeros(3, 1, 1))
    weight = log_prob.exp().detach().numpy()[:, None]  # Each token as often as it is drawn.
    loss, _ = config().loss(batch, np.arange(3), weight, out, num_rows=3, only_critic=False)
    assert torch.autograd.grad(loss, logits)[0].tolist() == pytest.approx(expected.tolist(), abs=1e-6)


def kl(student: ToyPolicy, teacher: ToyPolicy) -> float:
    with torch.no_grad():
        own, theirs = student._read(TARGETS, 1.0)[0], teacher._read(TARGETS, 1.0)[0]
        return float((own.exp() * (own - theirs)).sum(-1).mean())


def distilled(monkeypatch, control="none") -> tuple[float, float]:
    teacher, student = ToyPolicy(seed=7, hidden=64), ToyPolicy(seed=0)
    with torch.no_grad():  # A teacher with a will of its own.
        teacher.out.weight.mul_(6)
    before = kl(student, teacher)
    monkeypatch.setattr(distill, "load_policy", lambda path, device: teacher)
    learner = config(epochs=2, minibatch_size=64).build(student, control=control)
    for seed in range(60):
        learner.update(learner.prepare(roll_out(student, 16, 2, seed)))
    return before, kl(student, teacher)


def test_a_smaller_student_becomes_the_teacher(monkeypatch):
    before, after = distilled(monkeypatch)
    _, shuffled = distilled(monkeypatch, "shuffled_rewards")
    assert after < 0.1 * before and shuffled > 3 * after, (before, after, shuffled)


def test_the_teacher_is_asked_of_the_chunks_drawn_at_the_temperature_drawn(monkeypatch):
    teacher, student = ToyPolicy(seed=7), ToyPolicy(seed=0)
    monkeypatch.setattr(distill, "load_policy", lambda path, device: teacher)
    learner = config(micro_batch_size=5).build(student, temperature=1.6)
    batch = learner.prepare(roll_out(student, 4, 2, 0, temperature=1.6))
    expected = teacher.evaluate(batch.observations(np.arange(batch.size)), batch.chunks, 1.6).log_prob
    assert batch.reference_log_prob == pytest.approx(expected.detach().numpy(), abs=1e-6)


def test_what_does_not_fit_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match=r"algo\.kl_coef: unknown key"):
        config(kl_coef=0.1)
    student, teacher = ToyPolicy(), ToyPolicy()
    teacher.chunk_size = 4
    with pytest.raises(ConfigError, match=r"algo\.teacher: its chunk_size: 4, the student's: 2"):
        check_same_tokens(student, teacher)
    monkeypatch.setattr(distill, "load_policy", lambda path, device: ToyPolicy())
    learner, episodes = config().build(student), roll_out(student, 4, 2, 0)
    monkeypatch.setattr(type(student), "evaluate", lambda *_: PolicyOutput(torch.zeros(1, 2, 1), torch.zeros(1, 2, 1)))
    for episode in episodes:
        episode.chunks.__dict__["tokens"] = None
    monkeypatch.setattr(
        learner,
        "_evaluate",
        lambda episodes, episode, chunk, chunks: (np.zeros(chunks.actions.shape, np.float32), None),
    )
    with pytest.raises(ConfigError, match="have none"):
        learner.prepare(episodes)
