"""Evaluation on the dummy environment with a scripted policy: states, modes, lost episodes, JSON, pictures."""

import json
import math
from contextlib import closing, contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from reach_policy import ReachPolicy

from sim.dummy import DummyConfig
from vla_rl.common.distributed.process_group import ALONE
from vla_rl.common.row_noise import by_row
from vla_rl.config import ConfigError, validate
from vla_rl.evaluation import evaluate as evaluate_module
from vla_rl.evaluation.evaluate import (
    EvalConfig,
    episode_specs,
    evaluate,
    policy_hash,
    with_steps_after_success,
)
from vla_rl.evaluation.results import EpisodeJournal, Evaluation, EvaluationError, journals, read_journal, unfinished
from vla_rl.evaluation.statistics import wilson_interval
from vla_rl.rollout import runner as runner_module
from vla_rl.rollout.actors.rollouts import RayRolloutConfig
from vla_rl.rollout.runner import collect, run_episodes
from vla_rl.types import EpisodeSpec

ENV = DummyConfig(num_envs=4)
SMALL = EvalConfig(episodes_per_task=6, videos=0)


class FlakyEnv:
    """Breaks the episode of one initial state at its first chunk, the first `times` times."""

    def __init__(self, env, index: int, times: int) -> None:
        self.env, self.index, self.times = env, index, times
        self.num_envs, self.spec = env.num_envs, env.spec
        self.running = {}

    def reset(self, specs, env_ids=None):
        self.running.update(zip(env_ids, specs, strict=True))
        return self.env.reset(specs, env_ids)

    def step(self, actions, env_ids=None):
        result = self.env.step(actions, env_ids)
        lost = np.array([self.running[i].index == self.index and self.times > 0 for i in env_ids])
        self.times -= int(lost.sum())
        return replace(result, lost=lost, success=result.success & ~lost)


def test_a_perfect_policy_succeeds_everywhere_and_the_numbers_add_up():
    evaluation = evaluate(ReachPolicy(), ENV, SMALL, name="expert")
    assert evaluation.modes == ["greedy", "sampled"] and evaluation.tasks == ["reach_red", "reach_blue"]
    rate = evaluation.rate("greedy")
    assert (rate.num_episodes, rate.num_successes, rate.num_states, rate.rate) == (12, 12, 12, 1.0)
    assert rate.interval == wilson_interval(12, 12)
    steps = [e.steps for e in evaluation.select("greedy")]
    assert rate.mean_steps_to_success == np.mean(steps) and 1 <= min(steps) <= max(steps) < 16
    assert "100.0 % [" in rate.text() and rate.text().endswith("n = 12")


def test_a_slow_policy_fails_from_afar_with_the_whole_horizon():
    evaluation = evaluate(ReachPolicy(speed=0.2), ENV, replace_config(SMALL, episodes_per_task=20))
    rate = evaluation.rate("greedy")
    assert 0 < rate.num_successes < rate.num_episodes == 40
    assert all(e.steps == 16 for e in evaluation.select("greedy") if not e.success)
    per_task = [evaluation.rate("greedy", task).num_successes for task in evaluation.tasks]
    assert sum(per_task) == rate.num_successes
    helpless = evaluate(ReachPolicy(speed=0.0), ENV, replace_config(SMALL, temperatures=(0.0,)))
    assert math.isnan(helpless.rate("greedy").mean_steps_to_success)


def replace_config(config: EvalConfig, **changes) -> EvalConfig:
    return validate(EvalConfig, {**config.model_dump(), **changes})


def test_same_config_same_records_and_greedy_ignores_the_seed():
    policy = ReachPolicy(speed=0.2, noise=1.0)
    first, again = evaluate(policy, ENV, SMALL), evaluate(policy, ENV, SMALL)
    assert first.episodes == again.episodes
    other = evaluate(policy, ENV, replace_config(SMALL, seed=1))
    assert first.select("greedy") == other.select("greedy")
    assert [e.steps for e in first.select("sampled")] != [e.steps for e in other.select("sampled")]


def test_several_samples_of_a_state_count_once_as_a_state():
    config = replace_config(SMALL, samples_per_state=3, start_index=4)
    evaluation = evaluate(ReachPolicy(speed=0.2, noise=0.5), ENV, config)
    greedy, sampled = evaluation.rate("greedy"), evaluation.rate("sampled")
    assert (greedy.num_episodes, greedy.num_states) == (12, 12)
    assert (sampled.num_episodes, sampled.num_states) == (36, 12)
    assert {(e.index, e.sample) for e in evaluation.select("sampled", "reach_red")} == {
        (index, sample) for index in range(4, 10) for sample in range(3)
    }
    naive = wilson_interval(sampled.num_successes, 36)
    assert sampled.interval.high - sampled.interval.low > naive.high - naive.low


def test_modes_are_named_by_temperature():
    assert EvalConfig(temperatures=(0.0, 1.6)).modes() == {"greedy": 0.0, "sampled": 1.6}
    assert EvalConfig(temperatures=(0.5, 1.0)).modes() == {"sampled_T0.5": 0.5, "sampled_T1": 1.0}
    for wrong in ([], [-1.0], [1.0, 1.0]):
        with pytest.raises(ConfigError, match=r"eval\.temperatures"):
            validate(EvalConfig, {"temperatures": wrong}, "eval").modes()


@pytest.mark.parametrize("record_frames", [False, True])
def test_a_batchs_images_stay_within_the_memory_that_is_meant_for_them(record_frames, monkeypatch):
    """The gate's environment, in which validation runs too, may record an image a control step."""
    made = []

    def noted(*args, **kwargs):
        made.append(collect(*args, **kwargs))
        return made[-1]

    limit = 2**18
    monkeypatch.setattr(evaluate_module, "_MAX_BATCH_BYTES", limit)
    monkeypatch.setattr(runner_module, "collect", noted)
    with closing(DummyConfig(num_envs=2, horizon=16, image_size=16).build(record_frames=record_frames)) as env:
        evaluate(ReachPolicy(speed=0.2), env, replace_config(SMALL, episodes_per_task=50, temperatures=(0.0,)))
    sizes = [
        sum(image.nbytes for e in batch for image in (*e.obs.images.values(), *(e.frames or {}).values()))
        for batch in made
    ]
    assert len(sizes) > 1 and max(sizes) <= limit
    assert min(map(len, made[:-1])) > 4, "and are as large as that allows"


def test_lost_episodes_are_run_again():
    with_retry = evaluate(ReachPolicy(), FlakyEnv(ENV.build(), index=2, times=1), SMALL)
    assert with_retry.meta.num_retried == 1
    assert with_retry.rate("greedy").num_episodes == 12 and with_retry.rate("greedy").num_lost == 0


def test_episodes_lost_in_every_try_are_left_out_in_the_open():
    config = replace_config(SMALL, tasks=("reach_red",))
    evaluation = evaluate(ReachPolicy(), FlakyEnv(ENV.build(), index=2, times=10**6), config)
    rate = evaluation.rate("greedy")
    assert (rate.num_episodes, rate.num_successes, rate.num_lost) == (5, 5, 1)
    assert evaluation.meta.num_retried == 2 * 2
    (lost,) = [e for e in evaluation.select("greedy") if e.lost]
    assert lost.index == 2 and not lost.success
    assert "lost" in [column.header for column in evaluation.table().columns]


def test_meta_says_how_to_repeat_it(tmp_path):
    (tmp_path / "policy.json").write_text("{}")
    evaluation = evaluate(ReachPolicy(), ENV, SMALL, name="base", policy_path=tmp_path)
    meta = evaluation.meta
    assert (meta.name, meta.env, meta.split, meta.horizon["reach_red"]) == ("base", "dummy", "eval", 16)
    assert meta.policy_hash == policy_hash(tmp_path) and len(meta.policy_hash) == 64
    assert meta.temperatures == {"greedy": 0.0, "sampled": 1.0}
    assert meta.env_config["horizon"] == 16 and meta.config["episodes_per_task"] == 6
    assert "initial states 0 to 5" in meta.protocol and "torch" in meta.versions
    (tmp_path / "policy.json").write_text("{ }")
    assert policy_hash(tmp_path) != meta.policy_hash
    with pytest.raises(EvaluationError, match="policy not found"):
        policy_hash(tmp_path / "missing")


def test_meta_says_whether_states_are_official():
    assert evaluate(ReachPolicy(), ENV, SMALL).meta.official_states is False
    with closing(ENV.build()) as env:
        env.spec = replace(env.spec, num_eval_states=dict.fromkeys(env.spec.tasks, 50))
        assert evaluate(ReachPolicy(), env, SMALL).meta.official_states is True
        validated = replace_config(SMALL, split="validation")
        assert evaluate(ReachPolicy(), env, validated).meta.official_states is False


class ApproximateConfig(DummyConfig):
    """For training: the spec says so."""

    def env_spec(self):
        return replace(super().env_spec(), approximation="blurred pictures")

    def exact(self):
        return DummyConfig(num_envs=self.num_envs)


def test_an_approximation_for_training_is_refused_unless_asked_for():
    config = ApproximateConfig(num_envs=4)
    with pytest.raises(EvaluationError, match=r"for training: blurred pictures.*eval\.approximate=true"):
        evaluate(ReachPolicy(), config, SMALL)
    asked = evaluate(ReachPolicy(), config, replace_config(SMALL, approximate=True))
    assert "dummy (blurred pictures), eval split" in asked.meta.protocol
    assert "blurred" not in evaluate(ReachPolicy(), ENV, SMALL).meta.protocol


def test_states_that_do_not_exist_are_refused():
    spec = replace(ENV.env_spec(), num_eval_states={"reach_red": 5, "reach_blue": 50})
    with pytest.raises(EvaluationError, match=r"'reach_red' has 5 official initial states, asked for 0 to 5"):
        episode_specs(spec, SMALL)
    assert len(episode_specs(spec, replace_config(SMALL, split="validation"))) == 12
    with pytest.raises(EvaluationError, match="unknown task 'reach_green'; dummy has: reach_red, reach_blue"):
        episode_specs(spec, replace_config(SMALL, tasks=("reach_green",)))


def test_no_state_is_counted_twice():
    """With a task named twice each of its episodes was run, and counted, twice."""
    with pytest.raises(ConfigError, match=r"^eval\.tasks: .*name each task once"):
        validate(EvalConfig, {"tasks": ["reach_red", "reach_red"]}, prefix="eval")


def test_json_round_trip_and_readable_rates(tmp_path):
    evaluation = evaluate(ReachPolicy(speed=0.2, noise=0.5), ENV, SMALL)
    path = tmp_path / "evaluations/base.json"
    evaluation.save(path)
    assert Evaluation.load(path) == evaluation
    rates = {(r["mode"], r["task"]): r for r in json.loads(path.read_text())["rates"]}
    total = evaluation.rate("sampled")
    assert rates["sampled", "all"]["num_successes"] == total.num_successes
    assert rates["sampled", "all"]["low"] == pytest.approx(total.interval.low, abs=1e-6)


def test_unusable_files_are_named(tmp_path):
    path = tmp_path / "base.json"
    with pytest.raises(EvaluationError, match=r"evaluation not found: .*base\.json"):
        Evaluation.load(path)
    evaluate(ReachPolicy(), ENV, SMALL).save(path)
    whole = path.read_text()
    path.write_text(whole[: len(whole) // 2])
    with pytest.raises(EvaluationError, match=r"base\.json: not valid JSON, truncated"):
        Evaluation.load(path)
    path.write_text(whole.replace('"schema_version": 1', '"schema_version": 99'))
    with pytest.raises(EvaluationError, match="schema_version is 99, this version reads 1"):
        Evaluation.load(path)
    path.write_text(whole.replace('"split": "eval"', '"split": "exam"'))
    with pytest.raises(EvaluationError, match=r"base\.json: no usable evaluation: meta\.split"):
        Evaluation.load(path)


def test_table(tmp_path):
    evaluation = evaluate(ReachPolicy(speed=0.2), ENV, SMALL, name="base")
    assert evaluation.table().row_count == 6
    with pytest.raises(EvaluationError, match="no episodes of mode 'sample'"):
        evaluation.rate("sample")


def test_training_mode_is_put_back():
    class Module(ReachPolicy):
        def __init__(self) -> None:
            super().__init__()
            self.seen = []

        def act(self, obs, generator=None, temperature=1.0):
            self.seen.append(self.training)
            return super().act(obs, generator, temperature)

    policy = Module().train()
    evaluate(policy, ENV, SMALL)
    assert policy.training and not any(policy.seen)


def test_videos_of_successes_and_failures_at_every_step(tmp_path):
    import imageio.v2 as imageio

    config = replace_config(SMALL, episodes_per_task=10, videos=1, temperatures=(0.0,), tasks=("reach_red",))
    evaluation = evaluate(ReachPolicy(speed=0.2), ENV, config, name="base", video_folder=tmp_path)
    records = evaluation.select("greedy")
    names = sorted(p.name for p in tmp_path.iterdir())
    first_success = next(e for e in records if e.success)
    first_failure = next(e for e in records if not e.success)
    assert names == sorted(
        [
            f"base__reach_red__greedy__eval-{first_success.index:04d}__success.mp4",
            f"base__reach_red__greedy__eval-{first_failure.index:04d}__failure.mp4",
        ]
    )
    frames = imageio.mimread(tmp_path / f"base__reach_red__greedy__eval-{first_failure.index:04d}__failure.mp4")
    assert len(frames) == 1 + first_failure.steps == 17


def test_steps_to_success_are_none_after_it():
    usual, longer = (
        evaluate(ReachPolicy(), ENV.model_copy(update={"steps_after_success": steps}), SMALL).rate("greedy")
        for steps in (0, 8)
    )
    assert longer == usual and usual.mean_steps_to_success < 8


def test_environments_at_rays_hosts_are_evaluated_without_steps_after_success_too():
    placed = RayRolloutConfig().placed(ENV.model_copy(update={"steps_after_success": 8}))
    assert with_steps_after_success(placed, 0) == RayRolloutConfig().placed(ENV)


def test_films_do_not_pile_up_in_memory(tmp_path, monkeypatch):
    sizes = []

    def counted(policy, env, specs, **options):
        sizes.append(len(specs) if env.record_frames else 0)
        return collect(policy, env, specs, **options)

    monkeypatch.setattr(evaluate_module, "collect", counted)
    monkeypatch.setattr(evaluate_module, "_MAX_BATCH_BYTES", 0)
    config = replace_config(SMALL, episodes_per_task=3, videos=3, temperatures=(0.0,))
    evaluation = evaluate(ReachPolicy(speed=0.2), DummyConfig(num_envs=2), config, video_folder=tmp_path)
    assert len(list(tmp_path.iterdir())) == sum(sizes) == len(evaluation.episodes) == 6
    assert max(sizes) == 2 * 2 < 6


def test_the_result_is_there_before_anything_is_filmed(tmp_path):
    (tmp_path / "videos").write_text("a file, so that no video can be written")
    results = []
    with pytest.raises(OSError):
        evaluate(
            ReachPolicy(),
            ENV,
            replace_config(SMALL, videos=1),
            video_folder=tmp_path / "videos",
            on_result=results.append,
        )
    assert len(results) == 1 and results[0].episodes


class NoisyReach(ReachPolicy):
    """Its noise comes row by row."""

    def act(self, obs, generator=None, temperature=1.0):
        chunk = super().act(obs)
        noise = by_row(lambda shape, own: torch.randn(shape, generator=own), chunk.actions[..., :2].shape, generator)
        chunk.actions[..., :2] += temperature * noise.numpy()
        return chunk


def test_an_episode_that_went_down_with_anothers_worker_ends_as_it_would_have():
    """It was drawn anew: mostly the long ones, failures among them, so that the rate rose."""
    specs = [EpisodeSpec("reach_red", "eval", index) for index in range(8)]
    found = []
    for fault, num_workers in (("none", 0), ("die", 2)):
        env = DummyConfig(num_envs=4, num_workers=num_workers, tasks=("reach_red",), fault_step=5, fault=fault).build()
        options = {"temperature": 1.0, "seed": list(range(8)), "max_retries": 2}
        found.append(run_episodes(NoisyReach(speed=0.3), env, specs, **options))
        env.close()
    (healthy, _), (broken, num_retried) = found
    assert broken[0].lost and num_retried >= 3, "the first one took another one with it"
    for before, after in zip(healthy[1:], broken[1:], strict=True):
        assert not after.lost
        np.testing.assert_array_equal(before.chunks.actions, after.chunks.actions)


def test_a_dying_worker_costs_its_own_episode_only():
    config = DummyConfig(num_envs=2, num_workers=2, fault="die", fault_index=1, fault_step=2, tasks=("reach_red",))
    eval_config = EvalConfig(episodes_per_task=4, temperatures=(0.0,), videos=0)
    evaluation = evaluate(ReachPolicy(), config, eval_config)
    assert [e.lost for e in evaluation.episodes] == [False, True, False, False]
    assert evaluation.meta.num_retried == 2


class Single(NoisyReach):
    """As a policy that pads instructions to the longest of a batch, and then rounds otherwise: it takes one alone."""

    def act(self, obs, generator=None, temperature=1.0):
        assert len(set(obs.instruction)) == 1
        return super().act(obs, generator, temperature)


class Killed(BaseException):
    """In place of SIGKILL."""


def killed_after(num: int, file, **options) -> None:
    """An evaluation of `options` whose process ends without a word after `num` episodes."""
    left = num

    @contextmanager
    def progress(total, *, done=0):
        def on_episode(_):
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed

        yield on_episode

    with pytest.raises(Killed):
        evaluate(Single(speed=0.2), ENV, file=file, progress=progress, **options)


@pytest.mark.parametrize("num", [0, 7, 20])
def test_a_killed_evaluation_goes_on_where_it_was(tmp_path, num):
    """Equal to the bit, whatever was half written; in the end nothing but the result is left."""
    file, config = tmp_path / "final.json", replace_config(SMALL, samples_per_state=2)
    whole = evaluate(Single(speed=0.2), ENV, config)
    killed_after(num, file, config=config)
    (journal,) = journals(file)
    kept = unfinished(tmp_path)["final"]
    assert num < kept[0] < kept[1] == 36 == len(whole.episodes)
    with journal.open("a") as stream:
        stream.write('{"mode": "greedy", "task": "rea')
    told: list[int] = []

    @contextmanager
    def progress(total, *, done=0):
        told.extend([total, done])
        yield lambda record: told.append(record.index)

    policy = Single(speed=0.2)
    result = evaluate(policy, ENV, config, file=file, progress=progress, on_result=lambda found: found.save(file))
    assert result.episodes == whole.episodes
    assert told[:2] == [36, kept[0]] and len(told) == 2 + 36 - kept[0]
    assert [path.name for path in tmp_path.iterdir()] == ["final.json"]


def test_episodes_of_other_weights_or_options_are_refused_and_so_is_a_second_process(tmp_path):
    file = tmp_path / "final.json"
    killed_after(3, file, config=SMALL)
    with pytest.raises(EvaluationError, match=r"other weights or eval options; .*delete the file"):
        evaluate(ReachPolicy(), ENV, replace_config(SMALL, seed=1), file=file)
    subject, _ = read_journal(journals(file)[0])
    with EpisodeJournal(file, subject, ALONE), pytest.raises(EvaluationError, match="another process is at this"):
        evaluate(ReachPolicy(), ENV, SMALL, file=file)
    journals(file)[0].write_text("{}\n{]\n")
    with pytest.raises(EvaluationError, match="damaged"):
        evaluate(ReachPolicy(), ENV, SMALL, file=file)


def test_progress_is_told_in_the_order_of_the_states(tmp_path):
    """Successes end first: a rate of what has ended would begin at 100 %."""
    told = []

    @contextmanager
    def progress(total, *, done=0):
        yield told.append

    evaluation = evaluate(ReachPolicy(speed=0.3), ENV, SMALL, progress=progress)
    assert tuple(told) == evaluation.episodes
