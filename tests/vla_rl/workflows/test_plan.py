"""`vla-rl plan`: the simulation against times worked out by hand, and costs from where they come from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from vla_rl.cli import app as cli
from vla_rl.config import ConfigError
from vla_rl.recipe.recipe import load_recipe
from vla_rl.rollout.runner import collect
from vla_rl.training.memory import estimate, size_text
from vla_rl.types import EpisodeSpec
from vla_rl.workflows.gpu_bench import roofline
from vla_rl.workflows.gpu_bench.record import PartRecord, Results, Row
from vla_rl.workflows.plan.costs import Costs, Curve, from_bench, from_run
from vla_rl.workflows.plan.measure import smaller, with_spread
from vla_rl.workflows.plan.plan import MODES, Machines, make_plan, memory_text, placed
from vla_rl.workflows.plan.simulate import Dice, Mode, Placement, Work, learning_seconds, play, roll_out

COSTS = Costs(
    act=Curve(((1.0, 0.1), (100.0, 0.1))),
    forward=Curve(((1.0, 0.01), (10.0, 0.1))),
    update=Curve(((1.0, 0.03), (10.0, 0.3))),
    optimizer=0.5,
    other=0.25,
    step=(0.2,),
    reset=(0.5,),
    chunks=(3,),
    active=1.0,
    trained_bytes=0.0,
    sources=dict.fromkeys(("act", "step"), "measured here"),
)
WORK = Work(groups=2, group_size=2, minibatch_size=1000, micro_batch_size=10)


def rollout(episodes: int, envs: int, workers: int, mode: Mode = "synchronous", costs: Costs = COSTS) -> float:
    return roll_out(costs, episodes, Placement(mode, 1, envs, workers), Dice(costs, 0)).seconds


# --- rollouts by hand --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("episodes", "envs", "workers", "seconds"),
    [
        (4, 4, 4, 0.5 + 3 * (0.1 + 0.2)),
        (4, 4, 2, 1.0 + 3 * (0.1 + 0.4)),  # Each process has two environments, one after the other.
        (4, 4, 0, 2.0 + 3 * (0.1 + 0.8)),  # The policy's own process has all four.
        (4, 2, 2, 2 * (0.5 + 3 * (0.1 + 0.2))),  # Two rounds.
        (1, 4, 4, 0.5 + 3 * (0.1 + 0.2)),
        (3, 4, 2, 1.0 + 3 * (0.1 + 0.4)),
        (0, 4, 4, 0.0),
    ],
)
def test_a_rollout_in_lockstep(episodes, envs, workers, seconds):
    assert rollout(episodes, envs, workers) == pytest.approx(seconds)


def test_steps_that_vary_cost_what_the_slowest_takes():
    costs = replace(COSTS, step=(0.1, 0.3), reset=(0.0,), chunks=(2000,))
    mean = rollout(4, 4, 4, costs=costs) / 2000 - 0.1
    assert mean == pytest.approx(0.3 - 0.2 * 0.5**4, abs=0.005)


# --- learning by hand --------------------------------------------------------------------------


def test_learning():
    """25 and 15 decisions: old log-probabilities of 25 take 0.25; minibatches of 20 are dealt, 10 each, 0.3 and 0.5."""
    work = replace(WORK, minibatch_size=20, epochs=2)
    seconds, computed = learning_seconds(COSTS, work, [25, 15], 2, exchange=0.1)
    assert seconds == pytest.approx(0.25 + 2 * 2 * (0.3 + 0.5 + 0.1))
    assert computed == pytest.approx(0.2 + 2 * 2 * 0.8)
    assert learning_seconds(replace(COSTS, active=0.5), work, [40], 1, 0.0)[0] == pytest.approx(0.2 + 2 * (0.6 + 0.5))


def test_groups_are_dealt_whole_and_all_wait_for_who_has_more():
    """Three groups of two on two GPUs: one has four episodes, in two rounds of its two environments."""
    work = replace(WORK, groups=3)
    outcome = play(COSTS, work, Placement("synchronous", 2, 2, 2))
    assert outcome.rollout == pytest.approx(2 * 1.4)
    learning = 0.12 + 0.27 + 0.5  # 12 decisions of who has more; then 9 each.
    assert outcome.learning == pytest.approx(learning)
    assert outcome.seconds == pytest.approx(2.8 + learning + 0.25)
    assert outcome.episodes_per_second == pytest.approx(6 / outcome.seconds)
    acting = (6 * 0.1 + 3 * 0.1) / 2
    assert outcome.gpu_busy == pytest.approx((acting + (0.18 / 2 + 0.27 + 0.5)) / outcome.seconds)


# --- asynchronous by hand ----------------------------------------------------------------------

ONE_GROUP = replace(WORK, groups=1)


def apart(staleness: int, costs: Costs = COSTS, work: Work = ONE_GROUP, envs: int = 2) -> float:
    return play(costs, work, Placement("asynchronous", 2, envs, envs, 1, staleness)).seconds


def test_without_staleness_rollout_and_learning_take_turns():
    """Two environments: the first is acted for from 0.5 to 0.6, the second to 0.7; three such turns of 0.3: 1.5 s."""
    learning = 0.06 + 0.18 + 0.5 + 0.25
    assert apart(0) == pytest.approx(1.5 + learning)


def test_with_staleness_the_longer_of_the_two_decides():
    assert apart(2) == pytest.approx(0.5 + 3 * (0.1 + 0.2), rel=0.02)  # Each environment's own pace.
    slow_learner = replace(COSTS, optimizer=3.0)
    assert apart(2, slow_learner) == pytest.approx(0.06 + 0.18 + 3.0 + 0.25)
    outcome = play(slow_learner, ONE_GROUP, Placement("asynchronous", 2, 2, 2, 1, 2))
    assert outcome.waits_for == "learning"


def test_environments_that_vary_do_not_wait_for_each_other():
    varied = replace(
        COSTS, step=(0.05,) * 9 + (1.5,), act=Curve(((1.0, 0.001),)), chunks=(10,), optimizer=0.0, other=0.0
    )
    work = replace(WORK, groups=4, group_size=4)
    lockstep = play(varied, work, Placement("synchronous", 1, 8, 8)).seconds
    assert apart(1, varied, work, envs=8) < 0.6 * lockstep


def test_nothing_is_busier_than_always_and_nothing_is_lost():
    rng = np.random.default_rng(0)
    for _ in range(12):
        mode = MODES[int(rng.integers(len(MODES)))]
        costs = replace(
            COSTS,
            step=tuple(rng.lognormal(-2, 1, 20)),
            reset=tuple(rng.lognormal(-1, 1, 5)),
            chunks=tuple(int(n) for n in rng.integers(1, 9, 9)),
        )
        envs, workers = int(rng.integers(2, 9)), int(rng.integers(1, 5))
        work = Work(int(rng.integers(1, 9)), int(rng.integers(1, 5)), 16, 4, int(rng.integers(1, 3)))
        placement = Placement(mode, 3, envs, workers, 1, int(rng.integers(0, 3)))
        outcome = play(costs, work, placement, seed=1)
        assert 0 < outcome.gpu_busy <= 1 + 1e-9 and 0 < outcome.env_busy <= 1 + 1e-9
        assert outcome.episodes_per_second * outcome.seconds == pytest.approx(work.episodes)
        assert outcome == play(costs, work, placement, seed=1)


# --- the plan ----------------------------------------------------------------------------------


def test_modes_that_need_more_than_there_is_are_left_out():
    assert placed("asynchronous", COSTS, WORK, Machines(1, 8, 8)) is None


def test_gpus_are_shared_out_so_that_neither_side_waits_much():
    """A rollout takes 7 times as long as learning on as many GPUs."""
    costs = replace(COSTS, optimizer=0.0, other=0.0, step=(0.05,), reset=(0.0,), chunks=(20,))
    work = replace(WORK, groups=64, minibatch_size=64, micro_batch_size=8)
    placement = placed("asynchronous", costs, work, Machines(16, 4, 4))
    assert placement is not None
    best = play(costs, work, placement).episodes_per_second
    others = [play(costs, work, replace(placement, rollout_gpus=n)).episodes_per_second for n in (2, 6, 10, 14)]
    assert best > 0.9 * max(others) and best > 1.2 * min(others)


def test_a_plan_has_all_placements_and_is_written_whole(tmp_path):
    plan = make_plan(COSTS, replace(WORK, groups=8), Machines(4, 4, 4))
    assert {o.placement.mode for o in plan.outcomes} == set(MODES)
    assert plan.best.episodes_per_second == max(o.episodes_per_second for o in plan.outcomes)
    assert {number for number, _ in plan.by_gpus} == {1, 2, 4} and {n for n, _ in plan.by_envs} == {2, 4, 8, 16}
    slow, same = (max(o.episodes_per_second for n, o in plan.by_policy if n == factor) for factor in (4.0, 1.0))
    assert slow < same
    plan.save(tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text())["machines"]["gpus"] == 4


# --- where costs come from ---------------------------------------------------------------------


def test_a_curve():
    curve = Curve(((4.0, 1.0), (8.0, 2.0)))
    assert [curve.of(n) for n in (0, 1, 4, 6, 8, 12)] == [0.0, 1.0, 1.0, 1.5, 2.0, 3.0]
    assert Curve(((4.0, 1.0),)).of(8) == 2.0 and Curve(((4.0, 1.0), (8.0, 0.5))).of(16) == 0.5
    assert curve.times(2.0).of(6) == 3.0


def test_costs_are_written_and_read(tmp_path):
    COSTS.save(tmp_path / "costs.json")
    assert Costs.load(tmp_path / "costs.json") == COSTS
    (tmp_path / "costs.json").write_text('{"format": 1}')
    with pytest.raises(ConfigError, match="not costs that `vla-rl plan` wrote"):
        Costs.load(tmp_path / "costs.json")
    with pytest.raises(ConfigError, match="no sample of 'step'"):
        replace(COSTS, step=())
    with pytest.raises(ConfigError, match="negative"):
        replace(COSTS, optimizer=float("nan"))


def test_the_example_of_costs_is_read_and_says_that_it_is_computed():
    file = Path(__file__).resolve().parents[3] / "docs" / "examples" / "cluster" / "openvla_7b_costs.json"
    costs = Costs.load(file)
    assert {source.split()[0].strip(":") for source in costs.sources.values()} == {"computed", "assumed"}
    assert costs.act.of(16) == 0.152 and costs.update.of(8) == 0.222  # As docs/gpu.md has them.


RUN = {
    "time/simulation": 4.0, "time/inference": 2.0, "time/forward_backward": 8.0, "time/optimizer": 1.0,
    "time/other": 0.5, "rollout/length": 12.0, "rollout/num_episodes": 16.0, "advantage/decisions": 48.0,
    "advantage/active": 0.5, "update/num_steps": 2.0,
}  # fmt: skip


def write_run(folder: Path, rows: list[dict[str, float]]) -> Path:
    (folder / "policy").mkdir(parents=True)
    (folder / "policy" / "config.json").write_text('{"kind": "x", "architecture": {"chunk_size": 4}}')
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.yaml").write_text(
        "env: {kind: 'sim.dummy:DummyConfig', num_envs: 8, num_workers: 2}\n"
        "policy: {kind: openvla}\n"
        "algo: {kind: grpo, epochs: 1, micro_batch_size: 8}\n"
    )
    return folder


def test_costs_of_a_run(tmp_path):
    """48 decisions in 6 batches of 8; each of 2 processes stepped 24 chunks in 4 s; 24 decisions were learned from."""
    values, source = from_run(write_run(tmp_path / "run", [RUN | {"time/simulation": 99.0}, RUN]))
    assert values["act"].of(8) == pytest.approx(2.0 / 6)
    assert values["step"] == pytest.approx((4.0 * 2 / 48,)) and values["chunks"] == (3,)
    assert values["update"].of(8) == pytest.approx(8 * 8.0 / 24 / (4 / 3))
    assert values["forward"].of(8) == pytest.approx(values["update"].of(8) / 3)
    assert (values["optimizer"], values["other"], values["active"]) == (0.5, 0.5, 0.5)
    assert source.startswith("measured in 1 iterations of")


def test_costs_of_a_run_of_several_processes_are_one_processs(tmp_path):
    """The log has the first process's seconds, and the episodes and decisions of all."""
    alone, _ = from_run(write_run(tmp_path / "alone", [RUN]))
    together = RUN | {"rollout/num_processes": 2.0, "rollout/num_episodes": 32.0, "advantage/decisions": 96.0}
    assert from_run(write_run(tmp_path / "together", [together]))[0] == alone


def test_costs_of_a_run_with_rollouts_elsewhere_say_nothing_of_acting_and_stepping(tmp_path):
    folder = write_run(tmp_path / "run", [RUN | {"time/inference": 0.0}])
    with (folder / "config.yaml").open("a") as file:
        file.write("rollout: {kind: ray}\n")
    values, _ = from_run(folder)
    assert not {"act", "step", "reset"} & values.keys() and values["update"].of(8) > 0


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="not the folder of a run"):
        from_run(tmp_path)
    write_run(tmp_path / "run", [{"step": 1.0}])
    with pytest.raises(ConfigError, match="no iteration of `vla-rl train`"):
        from_run(tmp_path / "run")


def test_costs_of_a_gpu_benchmark(tmp_path):
    act = [Row("parallel, LoRA, eager, B=16", 160.0, "ms"), Row("parallel, LoRA, eager, B=1", 22.0, "ms"),
           Row("parallel, merged, eager, B=16", 1.0, "ms")]  # fmt: skip
    update = [Row("forward and backward, micro-batch of 8", 240.0, "ms"), Row("other", 1.0, "ms")]
    parts = {"act": PartRecord(rows=act), "update": PartRecord(rows=update)}
    results = Results(tmp_path, "full", {"device": "H200"}, parts)
    results.save()
    values, source = from_bench(tmp_path)
    assert values["act"].points == ((1.0, 0.022), (16.0, 0.16))
    assert values["update"].of(8) == pytest.approx(0.24) and values["forward"].of(8) == pytest.approx(0.06)
    assert "H200" in source
    with pytest.raises(ConfigError, match="neither acting nor updating"):
        Results(tmp_path / "none", "full", {}, {}).save()
        from_bench(tmp_path / "none")


# --- the command -------------------------------------------------------------------------------

RECIPE = """
run: train
name: tiny
env: {kind: 'sim.dummy:DummyConfig', num_envs: 4, tasks: [reach_red], horizon: 8}
policy: {kind: "my_policy:BinsConfig"}
algo: {kind: grpo, micro_batch_size: 4}
train: {groups: 4, group_size: 2}
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch) -> Path:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[3] / "docs" / "examples"))
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    return tmp_path / "tiny.yaml"


def command(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["plan", *arguments])


def test_the_command_measures_here_and_plans_again_from_what_it_wrote(recipe, tmp_path):
    out = tmp_path / "out"
    done = command(str(recipe), "--gpus", "2", "--workers", "2", "--seconds", "1", "--output", str(out))
    assert done.exit_code == 0, done.output
    assert "Measuring the stages here" in done.output and "best: " in done.output
    assert "cannot be counted by part" in done.output  # Its memory.
    costs = Costs.load(out / "costs.json")
    assert " on a CPU" in costs.sources["act"] and costs.caveat.startswith("Measured on a CPU: act, forward, update.")
    assert all(source.startswith("measured") for source in costs.sources.values())
    assert len(costs.chunks) >= 6 and max(costs.chunks) <= 2
    assert min(costs.step) > 0 and costs.act.of(4) > 0 and costs.update.of(4) > 0 and costs.trained_bytes > 0
    assert "svg" in (out / "plan.html").read_text()
    again = command(str(recipe), "--gpus", "2", "--workers", "2", "--costs", str(out), "--json")
    assert again.exit_code == 0 and json.loads(again.stdout) == json.loads((out / "plan.json").read_text())


@pytest.mark.parametrize(("micro_batch", "part"), [(16, 4), (10, 2), (7, 1), (1, 1)])
def test_learning_is_measured_in_whole_micro_batches(recipe, micro_batch, part):
    """A batch that ended in a small one would make all look cheaper."""
    wanted = load_recipe(str(recipe), [])
    env = wanted.env.build(num_envs=1)
    policy = wanted.policy.build(env.spec)
    found = collect(policy, env, [EpisodeSpec("reach_red", "train", state) for state in range(3)])
    assert smaller(micro_batch) == part
    size = max(2, micro_batch)
    episodes = with_spread(found, size)
    assert sum(episode.num_chunks for episode in episodes) == size
    batch = wanted.algo.build(policy, 0).prepare(episodes)
    assert batch.active.sum() == size and not size % part


def bench(folder: Path, size: str = "full") -> str:
    row = Row("parallel, LoRA, eager, B=16", 160.0, "ms")
    update = Row("forward and backward, micro-batch of 8", 240.0, "ms")
    Results(folder, size, {}, {"act": PartRecord(rows=[row]), "update": PartRecord(rows=[update])}).save()
    return str(folder)


# Of rank 32, on the seven linear layers of 32 blocks, in float32.
ADAPTER_BYTES = 4 * 32 * 32 * (4 * (4096 + 4096) + 3 * (4096 + 11008))
OPENVLA_7B = ("policy.kind=openvla", "policy.preset=7b", "policy.lora={rank: 32}", "policy.trainable=lora")


@pytest.fixture
def no_memory(monkeypatch) -> None:
    monkeypatch.setattr("vla_rl.workflows.plan.command.memory_text", lambda *_: "memory: not counted")


def planned_costs(*arguments: str) -> dict[str, Any]:
    done = command(*arguments, "--gpus", "2", "--seconds", "1", "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout[done.stdout.index("{") :])["costs"]


def test_where_only_acting_is_known_the_environment_is_measured_with_random_actions(recipe, tmp_path, no_memory):
    costs = planned_costs(str(recipe), *OPENVLA_7B, "--costs", bench(tmp_path / "b"))
    sources = costs["sources"]
    assert costs["chunks"] and "random actions in chunks of 8" in sources["step"]
    assert "bench gpu" in sources["act"] and "OpenVLA 7B with LoRA and one camera" in sources["act"]
    assert all(sources[name] == "assumed: nothing is known of it" for name in ("optimizer", "other", "active"))
    assert sources["trained_bytes"].startswith("computed") and costs["trained_bytes"] == ADAPTER_BYTES


@pytest.mark.parametrize("is_full", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_with_a_roofline_gradients_and_the_optimizer_are_not_free(recipe, no_memory, monkeypatch, is_full):
    """Fast, acting and updating are counted with a tiny network; what is trained is that of 7 billion either way."""
    for name in ("of_act", "of_update"):
        counted = getattr(roofline, name)
        monkeypatch.setattr(
            f"vla_rl.workflows.plan.command.{name}", lambda _, *more, counted=counted: counted(is_full, *more)
        )
    costs = planned_costs(str(recipe), *OPENVLA_7B, "--roofline")
    assert costs["trained_bytes"] == ADAPTER_BYTES
    assert costs["optimizer"] == pytest.approx(7 * costs["trained_bytes"] / 4.3e12)
    assert costs["sources"]["optimizer"] == costs["sources"]["act"] and costs["sources"]["other"].startswith("assumed")


def test_costs_of_tiny_networks_are_refused(recipe, tmp_path):
    done = command(str(recipe), *OPENVLA_7B, "--costs", bench(tmp_path / "b", "tiny"))
    assert done.exit_code == 2 and "was measured with --size tiny" in done.output


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("policy={}", "policy.kind is 'my_policy:BinsConfig'"),
        ("policy={kind: openvla}", "has 4 of 128"),
        ("policy={kind: openvla, path: 'someone/a-fine-tune'}", "this may be another"),
    ],
)
def test_costs_of_7_billion_parameters_are_for_that_policy_alone(recipe, tmp_path, policy, message, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if policy == "policy={}":
        policy = "seed=0"
    for option in (["--roofline"], ["--costs", bench(tmp_path / "b")]):
        done = command(str(recipe), policy, *option)
        text = " ".join(done.output.split())
        assert done.exit_code == 2 and "OpenVLA of 7 billion parameters alone" in text and message in text
        assert text.startswith(f"error: {option[0]}")


def test_memory_is_of_the_best_placement_and_of_gpus_that_only_roll_out(recipe):
    loaded = load_recipe(str(recipe), ["policy={kind: openvla}", "parallel=fsdp"])
    sharded = memory_text(loaded, Placement("synchronous", 8, 4, 4))
    assert sharded.startswith("each of 8 GPUs:") and "each of 8 processes" in sharded and "only roll out" not in sharded
    apart = memory_text(loaded, Placement("asynchronous", 8, 4, 4, rollout_gpus=5))
    assert apart.startswith("each of 3 GPUs that train:") and "each of 3 processes" in apart
    alone = estimate(loaded)
    last = apart.splitlines()[-1]
    assert last.startswith(f"each of 5 GPUs that only roll out: {size_text(alone.weights + alone.rollout)} ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--costs", "{tmp}"], "neither a folder of `vla-rl train`"),
        (["algo=null"], "algo: got None. A section is needed"),
    ],
)
def test_mistakes(recipe, tmp_path, arguments, message):
    done = command(str(recipe), *(a.replace("{tmp}", str(tmp_path)) for a in arguments))
    assert done.exit_code == 2 and message in done.output
