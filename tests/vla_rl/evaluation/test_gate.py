"""The gate: a gain made in an environment that is not real is confirmed, or taken back, by real episodes."""

from __future__ import annotations

import gc
import json
import weakref
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import torch
from pyarrow import parquet
from tiny_run import metrics, save_small_policy, small_recipe

from sim.dummy import DummyConfig, DummyEnv
from vla_rl.common.run_folder import open_run
from vla_rl.config import ConfigError
from vla_rl.data.source import LeRobotSource
from vla_rl.evaluation.executed import Executed, execute
from vla_rl.evaluation.gate import STEPS_AFTER_SUCCESS, Gate, GateCheck, GateConfig, KeptEpisodes, read_gate
from vla_rl.evaluation.verdict import outcome
from vla_rl.interfaces import EnvConfig
from vla_rl.policies.load import load_policy
from vla_rl.recipe.recipe import TRAIN, check
from vla_rl.rollout.runner import collect
from vla_rl.training.run import TrainingRun
from vla_rl.training.train import train
from vla_rl.types import EpisodeSpec, Keyframe

COUNTS: dict[str, Any] = {
    "gained": 5, "lost": 4, "tied": 11, "num_pairs": 20, "max_pairs": 20, "num_lost_pairs": 0, "num_episodes": 40,
    "rate_a": 0.4, "rate_b": 0.45, "interval": [-0.3, 0.4], "p_value": 1.0, "alpha": 0.05,
}  # fmt: skip
EXECUTED = ("gate/imagined", "gate/executed", "gate/gap", "gate/order")
REAL = "real_env={kind: 'sim.dummy:DummyConfig', num_envs: 8, tasks: [reach_red], horizon: 8}"


class DreamConfig(DummyConfig):
    """Stands for a world model: the dummy environment, said to be imagined."""

    is_imagined: ClassVar[bool] = True
    kind: str = ""  # type: ignore[assignment]


class ExecutedConfig(DreamConfig):
    """Stands for a world model whose episodes' actions are executed; what it imagines is so."""

    most_flattery: ClassVar[float | None] = 0.2  # type: ignore[assignment]

    def why_not_executed(self, real: EnvConfig) -> str:
        return ""


class FlatteringConfig(ExecutedConfig):
    """Imagines a success wherever the policy once moves far to the right."""

    def make(self, record_frames: bool = False) -> DummyEnv:
        class Flattering(DummyEnv):
            def apply(self, action: np.ndarray) -> bool:
                return super().apply(action) or action[0] > 0.85

        return Flattering(self, record_frames)


def dream(**options: Any) -> str:
    values = {"num_envs": 8, "tasks": ["reach_red"], "horizon": 8, **options}
    return f"env={json.dumps({'kind': f'{__name__}:DreamConfig', **values})}"


@pytest.fixture(scope="module")
def wanderer(tmp_path_factory) -> Path:
    """A policy that moves at random."""
    return save_small_policy(tmp_path_factory.mktemp("gate") / "wanderer")


@pytest.fixture(scope="module")
def stone(wanderer, tmp_path_factory) -> Path:
    """The same, but all that it decides is not to move."""
    policy = load_policy(wanderer)
    policy.net[-1].bias.data.unflatten(0, (-1, 21))[:, 10] = 100.0  # The bin of 0.
    folder = tmp_path_factory.mktemp("gate") / "stone"
    policy.save(folder)
    return folder


def checked(tmp_path: Path, first: Path, second: Path, checks_left: int, **options: Any):
    """A gate whose reference policy is `first`, and its check of `second` at iteration 5."""
    gate = Gate(GateConfig(every=1, **options), tmp_path / "confirmed", load_policy(first))
    with closing(DummyConfig(num_envs=8, horizon=32).build()) as env:
        check = gate.check(
            load_policy(second), env, iteration=5, imagined=0.9, temperature=1.0, seed=0, checks_left=checks_left
        )
    return gate, check


def same_weights(a: Path, b: Path) -> bool:
    first, second = load_policy(a).state_dict(), load_policy(b).state_dict()
    return all(torch.equal(first[name], second[name]) for name in first)


def test_a_real_gain_moves_the_mark(tmp_path, stone, wanderer):
    gate, check = checked(tmp_path, stone, wanderer, checks_left=2)
    assert (check.verdict, check.rolled_back) == ("better", False) and check.comparison.interval.low > 0
    assert check.pooled is not None and check.pooled.better >= check.pooled.needed == 20 and check.pooled.worse < 1
    assert gate.reference == 5 and not gate.is_closed and same_weights(gate.confirmed, wanderer)
    assert gate.evidence.evidence.tolist() == [1, 1], "starts anew where the reference policy moved"
    assert "gate at iteration 5: better; real success" in check.text() and "imagined 90 %" in check.text()


@pytest.mark.parametrize("keep", ["decisions", "frames"])
def test_a_checks_episodes_are_kept_of_both_policies(tmp_path, stone, wanderer, keep):
    config = GateConfig(every=1, pairs=12, keep_episodes=keep, alpha=1e-9)
    gate = Gate(config, tmp_path / "confirmed", load_policy(stone), episodes=tmp_path / "kept")
    with closing(DummyConfig(num_envs=8, horizon=32).build(record_frames=keep == "frames")) as env:
        for _ in range(2):  # After a kill a check is made again.
            check = gate.check(
                load_policy(wanderer), env, iteration=5, imagined=None, temperature=1.0, seed=0, checks_left=1
            )
    reference, own = (LeRobotSource(tmp_path / "kept/iteration_00005" / name) for name in ("reference", "checked"))
    real = check.comparison
    assert len(reference.lengths) == len(own.lengths) == 12 == real.num_episodes / 2
    assert reference.success is not None and own.success is not None
    assert (reference.success.mean(), own.success.mean()) == (real.rate_a, real.rate_b)
    starts = reference.initial_states()
    assert starts == own.initial_states() and starts[0].endswith(f"/validation/{config.start_index + 12}")
    notes = json.loads((own.root / "collect.json").read_text())
    assert notes["gate"] == {"reference": 0, "iteration": 5} and (notes["observed_every"] == 1) == (keep == "frames")


def test_kept_episodes_do_not_stay_in_memory(tmp_path, wanderer, monkeypatch):
    """A check's, with an image a control step, would be gigabytes."""
    config = GateConfig(every=1, pairs=24, keep_episodes="frames", alpha=1e-9)
    gate = Gate(config, tmp_path / "confirmed", load_policy(wanderer), episodes=tmp_path / "kept")
    episodes: list[weakref.ref[Any]] = []
    left: list[int] = []
    add = KeptEpisodes.add

    def noted(self: KeptEpisodes, *both: Any) -> None:
        gc.collect()
        left.append(sum(one() is not None for one in episodes))
        episodes.extend(weakref.ref(episode.frames["agentview"]) for part in both for episode in part)
        add(self, *both)

    monkeypatch.setattr(KeptEpisodes, "add", noted)
    with closing(DummyConfig(num_envs=8, horizon=8).build(record_frames=True)) as env:
        gate.check(load_policy(wanderer), env, iteration=5, imagined=None, temperature=1.0, seed=0, checks_left=1)
    assert len(episodes) == 48 and left == [0, 0, 0]


def test_kept_episodes_go_on_after_success(tmp_path, wanderer):
    """As those do that a world model learns from: it judges an episode by what is seen afterwards, too."""
    config = GateConfig(every=1, pairs=24, keep_episodes="frames", alpha=1e-9)
    gate = Gate(config, tmp_path / "confirmed", load_policy(wanderer), episodes=tmp_path / "kept")
    with closing(config.build_env(DummyConfig(num_envs=8, horizon=32))) as env:
        gate.check(load_policy(wanderer), env, iteration=5, imagined=None, temperature=1.0, seed=0, checks_left=1)
    table = parquet.read_table(tmp_path / "kept/iteration_00005/checked/data")
    reward, numbers = (np.array(table[name]) for name in ("next.reward", "episode_index"))
    found = [reward[numbers == number] for number in np.unique(numbers)]
    after = [(len(row) - 1 - row.argmax(), len(row)) for row in found if row.any()]
    assert after and all(left == STEPS_AFTER_SUCCESS or length == 32 for left, length in after)


def test_nothing_is_kept_unless_asked_for_and_not_of_several_processes(tmp_path, stone, wanderer):
    checked(tmp_path, stone, wanderer, checks_left=1, pairs=8)
    assert [path.name for path in tmp_path.iterdir()] == ["confirmed"]
    several = cast(Any, SimpleNamespace(size=2))
    with pytest.raises(ConfigError, match=r"gate\.keep_episodes: got 'frames' with 2 processes"):
        Gate(GateConfig(every=1, keep_episodes="frames"), tmp_path, load_policy(stone), several)


def test_a_loss_is_rolled_back_by_any_check(tmp_path, stone, wanderer):
    gate, check = checked(tmp_path, wanderer, stone, checks_left=2)
    assert (check.verdict, check.rolled_back, check.comparison.decision) == ("worse", True, "worse")
    assert gate.reference == 0 and gate.is_closed and same_weights(gate.confirmed, wanderer)
    assert "gate at iteration 5: worse, rolled back; real success" in check.text()


def test_what_is_undecided_is_kept_also_by_the_last_check(tmp_path, wanderer):
    for checks_left, consequence in (
        (2, "undecided, RL continues"),
        (1, "undecided, kept though its gain is not shown"),
    ):
        gate, check = checked(tmp_path / str(checks_left), wanderer, wanderer, checks_left=checks_left, pairs=8)
        assert (check.verdict, check.rolled_back, check.is_last) == ("undecided", False, checks_left == 1)
        assert gate.reference == 0 and not gate.is_closed
        assert f"gate at iteration 5: {consequence}; real success" in check.text()


def test_a_later_check_goes_on_with_the_evidence_also_after_a_resume(tmp_path, stone, wanderer):
    gate, first = checked(tmp_path, stone, wanderer, checks_left=2, pairs=12, alpha=1e-9)
    again = Gate(gate.config, gate.folder, load_policy(stone))
    again.load_state(json.loads(json.dumps(gate.state())))
    options: dict[str, Any] = {"iteration": 6, "imagined": 0.9, "temperature": 1.0, "seed": 0, "checks_left": 1}
    with closing(DummyConfig(num_envs=8, horizon=32).build()) as env:
        second, resumed = (each.check(load_policy(wanderer), env, **options) for each in (gate, again))
    assert second == resumed and second.verdict == "undecided"
    assert first.pooled is not None and second.pooled is not None
    assert first.pooled.better > 1 > first.pooled.worse and second.pooled.better > 1 > second.pooled.worse
    assert (first.pooled.num_pairs, second.pooled.num_pairs, second.pooled.num_checks) == (12, 24, 2)
    assert second.pooled.gained == first.comparison.gained + second.comparison.gained > 0
    assert "evidence of 2 checks together, +" in second.text() and "in 24 pairs" in second.text()


def test_later_checks_use_fresh_states_and_a_checkpoint_remembers_them(tmp_path, stone, wanderer):
    gate, first = checked(tmp_path, stone, wanderer, checks_left=2)
    state = json.loads(json.dumps(gate.state()))
    again = Gate(gate.config, gate.folder, load_policy(stone))
    again.load_state(state)
    assert again.reference == 5 and again.checks == gate.checks and same_weights(again.confirmed, wanderer)
    seen = []
    with closing(DummyConfig(num_envs=8, horizon=8).build()) as env:
        reset = env.reset
        env.reset = lambda specs, ids=None: (seen.extend(specs), reset(specs, ids))[1]
        again.check(load_policy(wanderer), env, iteration=6, imagined=0.9, temperature=1.0, seed=0, checks_left=2)
    assert min(spec.index for spec in seen) == gate.config.start_index + first.comparison.num_pairs


def test_pairs_that_are_lost_take_their_states_and_their_part_of_the_budget(tmp_path, wanderer, monkeypatch):
    """Else a later check would come back to states that have decided, and a loop's next round to this one's."""
    gate = Gate(GateConfig(every=1, pairs=10, alpha=1e-9), tmp_path / "confirmed", load_policy(wanderer))
    first, begun, running = gate.config.start_index, [], {}
    options: dict[str, Any] = {"imagined": 0.9, "temperature": 1.0, "seed": 0, "checks_left": 2}
    with closing(DummyConfig(num_envs=4, horizon=8, tasks=("reach_red",)).build()) as env:
        reset, step = env.reset, env.step

        def noted(specs: Any, env_ids: Any = None) -> Any:
            begun.extend(spec.index for spec in specs)
            running.update(zip(env_ids, specs, strict=True))
            return reset(specs, env_ids)

        def broken(actions: Any, env_ids: Any = None) -> Any:
            lost = np.array([running[i].index in (first, first + 9) for i in env_ids])
            return replace(step(actions, env_ids), lost=lost)

        monkeypatch.setattr(env, "reset", noted)
        monkeypatch.setattr(env, "step", broken)
        found = [gate.check(load_policy(wanderer), env, iteration=n, **options).comparison for n in (1, 2)]
    assert [(each.num_pairs, each.num_lost_pairs) for each in found] == [(8, 2), (10, 0)]
    assert sorted(set(begun)) == list(range(first, first + 20)), "ten of each check"
    assert [begun.count(first + n) for n in (0, 5, 10)] == [6, 2, 2], "three tries of either policy"


def test_a_run_that_got_worse_goes_back_to_its_base_policy(tmp_path, wanderer):
    """RL with a rate at which the policy soon does but one thing, right from two initial states at best."""
    options = ("gate={every: 4, pairs: 80}", "algo.optim.lr=1", "sampling.first_state=7")
    recipe = small_recipe(wanderer, dream(), REAL.replace("horizon: 8", "horizon: 32"), *options)
    folder = tmp_path / "run"
    train(recipe, open_run(recipe, folder, resume=False))
    gate = json.loads((folder / "gate.json").read_text())
    last = gate["checks"][-1]
    assert last["rolled_back"] and last["verdict"] == "worse" and gate["reference"] == 0
    assert gate["power"].startswith("what the gate can tell")
    assert same_weights(folder / "policy", wanderer) and not same_weights(folder / "rejected", wanderer)
    logged: dict[str, float] = {}
    for row in metrics(folder):
        logged |= row if row["step"] == last["iteration"] else {}
    assert last["imagined"] == logged["train/success"] and last["comparison"]["rate_b"] == logged["gate/real"]


def test_a_run_whose_checks_do_not_tell_keeps_its_newest_policy(tmp_path, wanderer, capsys):
    recipe = small_recipe(wanderer, dream(), REAL, "gate.every=2", "gate.pairs=8", "log.console=true")
    folder = tmp_path / "run"
    train(recipe, open_run(recipe, folder, resume=False))
    gate = json.loads((folder / "gate.json").read_text())
    assert {check["verdict"] for check in gate["checks"]} == {"undecided"} and gate["reference"] == 0
    assert [check["is_last"] for check in gate["checks"]] == [False] * (len(gate["checks"]) - 1) + [True]
    assert [check["pooled"]["num_checks"] for check in gate["checks"]] == list(range(1, len(gate["checks"]) + 1))
    assert not (folder / "rejected").exists() and not same_weights(folder / "policy", wanderer)
    printed = capsys.readouterr().out
    assert printed.index("what the gate can tell") < printed.index("gate at iteration 2: undecided, RL continues")


@pytest.mark.parametrize(
    "options",
    [["gate={every: 2, pairs: 8}"], ["train.validate_every=2", "train.validation_episodes=2"]],
    ids=["gate", "validation"],
)
def test_a_kill_runs_no_finished_check_or_validation_again(tmp_path, wanderer, monkeypatch, options):
    """A checkpoint follows each, whenever the next one is due."""
    recipe = small_recipe(wanderer, dream(), REAL, *options, "train.save_every=100", "train.keep_checkpoints=9")
    measured: list[int] = []
    for name in ("check_gain", "validate"):
        measure = getattr(TrainingRun, name)

        def counted(self: TrainingRun, *episodes: Any, measure: Any = measure) -> None:
            measured.append(self.iteration)
            measure(self, *episodes)

        monkeypatch.setattr(TrainingRun, name, counted)
    folder, iterations = open_run(recipe, tmp_path / "run", resume=False), iter([1, 2, 0])

    def kill_after_two() -> None:
        if next(iterations) == 2:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train(recipe, folder, on_iteration=kill_after_two)
    assert measured == [2] and len(list((folder / "checkpoints").iterdir())) == 1
    train(recipe, folder, resume=True)
    assert measured == [2, 4], "the first was not run again"


SPREAD = ("gate={every: 2, pairs: 24}", "sampling={first_state: 0, train_states: null}", "train.groups=8")


def test_rl_stops_where_imagination_flatters_the_policy(tmp_path, wanderer):
    """Its actions succeed in what is imagined, and seldom where they are executed."""
    env = dream(kind=f"{__name__}:FlatteringConfig", horizon=16)
    recipe = small_recipe(wanderer, env, REAL.replace("horizon: 8", "horizon: 16"), *SPREAD)
    folder = open_run(recipe, tmp_path / "run", resume=False)
    train(recipe, folder)
    (check,) = read_gate(folder / "gate.json").checks
    done = check.executed
    assert isinstance(done, Executed) and done.imagined - done.caused > 0.4 and done.gap.low > 0.2 == done.at_most
    assert (done.num_episodes, check.num_episodes) == (24, check.comparison.num_episodes + 24)
    assert check.iteration == 2 and check.is_last and not check.rolled_back, "of four; nothing says that it is worse"
    assert not (folder / "rejected").exists() and not same_weights(folder / "policy", wanderer)
    logged = metrics(folder)
    assert [row["step"] for row in logged if "train/success" in row] == [1, 2]
    assert [row["gate/gap"] for row in logged if "gate/gap" in row] == [done.gap.value]
    told = "RL stops: imagined success surely exceeds that of the same actions by over 20 points"
    assert check.text().endswith(told) and told in outcome(folder)
    train(recipe, folder, resume=True)
    assert metrics(folder) == logged, "nor does a resumed run go on"


def test_rl_goes_on_where_what_is_imagined_is_so_and_nothing_else_of_it_changes(tmp_path, wanderer):
    """Killed behind the first check and resumed, too."""
    found = {}
    for name in ("DreamConfig", "ExecutedConfig"):
        recipe = small_recipe(wanderer, dream(kind=f"{__name__}:{name}"), REAL, *SPREAD, "train.allow_no_success=true")
        folder, iterations = open_run(recipe, tmp_path / name, resume=False), iter([1, 2, 0, 0, 0])

        def kill_after_two(iterations: Any = iterations, name: str = name) -> None:
            if next(iterations) == 2 and name == "ExecutedConfig":
                raise ZeroDivisionError

        with suppress(ZeroDivisionError):
            train(recipe, folder, on_iteration=kill_after_two)
        train(recipe, folder, resume=True)
        rows = [{key: row[key] for key in row if key not in EXECUTED} for row in metrics(folder)]
        found[name] = rows, read_gate(folder / "gate.json").checks, load_policy(folder / "policy").state_dict()
    (rows, checks, weights), (others, executed, same) = found.values()
    assert rows == others and [check.iteration for check in checks] == [2, 4] and len(weights) == len(same)
    assert all(torch.equal(weights[name], same[name]) for name in weights)
    for plain, other in zip(checks, executed, strict=True):
        done = other.executed
        assert isinstance(done, Executed) and done.gap.value == 0 and done.imagined == done.caused > 0
        assert (
            done.order is not None
            and done.order.value == pytest.approx(1)
            and "order within a state 1.00" in done.text()
        )
        assert other.model_copy(update={"executed": plain.executed}) == plain


def test_a_few_whole_episodes_of_each_initial_state_are_executed(wanderer):
    specs = [EpisodeSpec("reach_red", "train", index) for index in (0, 1, 2, 3) for _ in range(6)]
    with closing(cast(Any, DummyConfig(num_envs=5, horizon=8, tasks=("reach_red",))).build()) as env:
        episodes = collect(load_policy(wanderer), env, specs, seed=0)
        started, reset, step = [], env.reset, env.step
        env.reset = lambda specs, ids=None: (started.extend(spec.index for spec in specs), reset(specs, ids))[1]
        episodes[0] = replace(episodes[0], lost=True)
        episodes[6:12] = [replace(e, spec=replace(e.spec, keyframe=Keyframe("", "", 0, {}))) for e in episodes[6:12]]
        done = execute(env, episodes, 10, None)
        assert started == [0] * 4 + [2] * 4 + [3] * 2 and isinstance(done, Executed) and done.stop_text == ""
        env.step = lambda actions, ids: replace(step(actions, ids), lost=np.array([i == 1 for i in ids]))
        broken = execute(env, episodes, 10, None)
        assert isinstance(broken, Executed) and (broken.num_episodes, broken.gap.n) == (10, 8), "one in each batch"
        env.step = lambda actions, ids: replace(step(actions, ids), lost=np.ones(len(ids), bool))
        assert execute(env, episodes, 10, None) == "every one was lost"
        assert execute(env, episodes[6:12], 10, None) == "none of the newest episodes began at an initial state"


def test_a_check_that_does_not_reject_leaves_no_rejected_policy(tmp_path, wanderer):
    """Where one did before a kill, and was run again: the loop's next episodes would be of that policy."""
    recipe = small_recipe(wanderer, dream(), REAL, "gate.every=4", "gate.pairs=8")
    folder = open_run(recipe, tmp_path / "run", resume=False)
    load_policy(wanderer).save(folder / "rejected")
    train(recipe, folder, resume=True)
    gate = json.loads((folder / "gate.json").read_text())
    assert not gate["checks"][-1]["rolled_back"] and not (folder / "rejected").exists()


def test_imagined_success_is_not_known_where_all_episodes_began_at_keyframes(tmp_path, wanderer):
    recipe = small_recipe(wanderer, dream(), REAL, "gate.every=1", "gate.pairs=4")
    folder = open_run(recipe, tmp_path / "run", resume=False)
    place = Keyframe("dummy", "reach_red", 0, {})
    with TrainingRun(recipe, folder, resume=False) as run:
        assert run.goes_on()
        episodes = [replace(each, spec=replace(each.spec, keyframe=place)) for each in run.roll_out()]
        run.finish_iteration(episodes, {})
        run.check_gain(episodes)
    check = GateCheck.model_validate(json.loads((folder / "gate.json").read_text())["checks"][0])
    assert check.executed == "env.kind 'test_gate:DreamConfig' does not say that its episodes begin in a simulator"
    assert check.imagined is None and "imagined from initial states: not known" in check.text()
    (row, *_) = metrics(folder)
    assert row["train/success_from_keyframes"] == row["train/success"] and "train/imagined" not in row


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([dream(), "train.evaluate=after"], "real_env: the recipe has none"),
        ([dream(), "gate.every=2"], "real_env: the recipe has none"),
        ([dream(), REAL, "gate.every=2", "train.keep=best", "train.validate_every=1"], "train.keep: got 'best'"),
        ([dream(), REAL.replace("8}", "8, image_size: 48}"), "gate.every=2"], "real_env: its image_size is"),
        ([dream(tasks=["reach_blue"]), REAL, "gate.every=2"], "real_env.tasks: lacks reach_blue"),
        (["gate.every=2"], "gate.every: env is no world model"),
        ([dream(), REAL, "gate={every: 2, split: eval}"], "gate.split: got 'eval'"),
        ([REAL], "real_env: is for a recipe whose env is a world model"),
        ([dream(), f"real_env={dream().removeprefix('env=')}"], "and is itself a simulator or robot"),
    ],
)
def test_what_does_not_fit_together_is_refused(tmp_path, wanderer, overrides, message):
    with pytest.raises(ConfigError, match=message):
        recipe = small_recipe(wanderer, *overrides)
        check(recipe, TRAIN)
