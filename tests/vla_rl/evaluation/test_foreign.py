"""Files that other programs' own writers wrote: read, recognized, compared, reported.

`foreign/` was written by these functions, run as they stand at: vla-eval 2026-08-12 (`ResultCollector.to_json`), RLinf
2026-08-22 (`print_metrics_table`, `record_completed_episode_task_stats`), SimpleVLA-RL 2026-01-06 (`LocalLogger`,
`save_rollout_video`). LeRobot's is written here, by its installed version.
"""

from __future__ import annotations

import json
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from test_compare import make
from typer.testing import CliRunner

from vla_rl.cli.app import app
from vla_rl.evaluation.foreign import AS_RUN, compare_any, read_evaluation
from vla_rl.evaluation.results import EvaluationError

HERE = Path(__file__).parent / "foreign"
DRAWER, STOVE = "open_the_middle_drawer_of_the_cabinet", "put_the_bowl_on_the_stove"
LABELS = {DRAWER: "0 open middle drawer", STOVE: "3 put bowl on stove"}


class Countdown(gymnasium.Env):
    """Ends after four steps, with success where the seed is even."""

    metadata = {"render_fps": 10}  # noqa: RUF012
    observation_space = gymnasium.spaces.Dict({"agent_pos": gymnasium.spaces.Box(-1, 1, (2,), np.float32)})
    action_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    _max_episode_steps, task, task_description = 4, "count", "count down"

    def reset(self, *, seed=None, options=None):
        self.seed, self.steps = seed or 0, 0
        return self.observation_space.sample(), {}

    def step(self, action):
        self.steps += 1
        done = self.steps == 4
        return self.observation_space.sample(), float(done), done, False, {"is_success": done and self.seed % 2 == 0}


@pytest.fixture(scope="module")
def eval_info(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """LeRobot's `eval_info.json`, by its own evaluation of one of its policies."""
    from lerobot.configs.types import FeatureType, PolicyFeature
    from lerobot.policies.act.configuration_act import ACTConfig
    from lerobot.policies.act.modeling_act import ACTPolicy
    from lerobot.scripts.lerobot_eval import eval_policy_all

    state = {"observation.state": PolicyFeature(FeatureType.STATE, (2,))}
    state["observation.environment_state"] = PolicyFeature(FeatureType.ENV, (2,))
    small = {"dim_model": 8, "n_heads": 1, "dim_feedforward": 8, "n_encoder_layers": 1, "n_vae_encoder_layers": 1}
    action = {"action": PolicyFeature(FeatureType.ACTION, (2,))}
    config = ACTConfig(
        input_features=state,
        output_features=action,
        chunk_size=4,
        n_action_steps=4,
        device="cpu",
        latent_dim=2,
        **small,
    )
    policy = ACTPolicy(config)

    def prepared(observation):
        return observation | {"observation.environment_state": observation["observation.state"]}

    def envs():
        return gymnasium.vector.SyncVectorEnv([Countdown] * 2)

    def same(value):
        return value

    info = eval_policy_all(
        {"libero_goal": {0: envs(), 3: envs()}}, policy, same, same, prepared, same, n_episodes=6, start_seed=1000
    )
    path = tmp_path_factory.mktemp("lerobot") / "eval_info.json"
    path.write_text(json.dumps(info, indent=2))
    return path


def rates(path: Path) -> dict[str, tuple[float, int]]:
    evaluation = read_evaluation(path)
    assert evaluation.modes == [AS_RUN]
    found = {task: evaluation.rate(AS_RUN, task) for task in evaluation.tasks}
    return {task: (rate.num_successes, rate.num_episodes) for task, rate in found.items()}


def test_lerobots_own_file_is_read(eval_info: Path):
    written = json.loads(eval_info.read_text())["overall"]
    assert rates(eval_info) == {"libero_goal/0": (3, 6), "libero_goal/3": (3, 6)}
    assert read_evaluation(eval_info).rate(AS_RUN).rate == written["pc_success"] / 100 == 0.5


@pytest.mark.parametrize(
    ("file", "expected", "program"),
    [
        ("vla_eval.json", {DRAWER.replace("_", " "): (4, 6), STOVE.replace("_", " "): (4, 7)}, "vla-eval"),
        ("rlinf.log", {"0": (3, 4), "3": (3, 4)}, "RLinf"),  # The second of two rounds, without its duplicate.
        ("rlinf_table.log", {"all": (39, 48)}, "RLinf"),  # 0.8125 in the last table, of evaluation, not of training.
        ("simplevla_rollouts.log", {"libero_goal/0": (2, 4), "libero_goal/3": (2, 4)}, "SimpleVLA-RL"),
        ("simplevla_run.log@24", {"all": (12, 24)}, "SimpleVLA-RL"),
        ("simplevla_console.log@24", {"all": (12, 24)}, "SimpleVLA-RL"),
    ],
)
def test_other_programs_files_are_recognized_and_read(file: str, expected: dict, program: str):
    assert rates(HERE / file) == expected
    assert read_evaluation(HERE / file).meta.config["read_from"] == program


def test_csv_is_read_with_and_without_states(tmp_path: Path):
    (tmp_path / "a.csv").write_text("task,state,success\npush,0,1\npush,1,False\npush,1,true\n")
    named = read_evaluation(tmp_path / "a.csv")
    assert [(e.index, e.sample, e.success) for e in named.episodes] == [(0, 0, True), (1, 0, False), (1, 1, True)]
    (tmp_path / "b.csv").write_text("success, note\n1, x\n0, y\n")
    assert rates(tmp_path / "b.csv") == {"all": (1, 2)}
    (tmp_path / "c.csv").write_text("success\n1\nmaybe\n")
    with pytest.raises(EvaluationError, match=r"c\.csv: looks like CSV's.*row 2: success is 'maybe'"):
        read_evaluation(tmp_path / "c.csv")


def test_what_cannot_be_read_says_what_can(tmp_path: Path):
    with pytest.raises(EvaluationError, match=r"a rate, 50\.0 %, and not of how many episodes. Write FILE@EPISODES"):
        read_evaluation(HERE / "simplevla_run.log")
    for text in ('{"a": 1}', "hello", ""):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(EvaluationError, match=r"x\.json: of no known program; read are: .*LeRobot's eval_info"):
            read_evaluation(tmp_path / "x.json")
    (tmp_path / "cut.json").write_text('{"per_task": [{"task_group": "a"}]}')
    with pytest.raises(EvaluationError, match=r"cut\.json: looks like LeRobot's, but cannot be read: 'task_id'"):
        read_evaluation(tmp_path / "cut.json")


def test_named_official_states_pair_with_ours(tmp_path: Path):
    ours = make({DRAWER: [1] * 8, STOVE: [0] * 8}, mode="greedy", labels=LABELS, official_states=True)
    comparison = compare_any(read_evaluation(HERE / "vla_eval.json"), ours)
    result = comparison.result("greedy")
    assert (result.num_pairs, result.gained, result.lost) == (13, 2, 4) and result.apart is None
    assert comparison.population.startswith("paired: both name their initial states")
    assert "vla_eval: 1 episodes ended by an error and count as failures" in comparison.text()
    rlinf = compare_any(ours, read_evaluation(HERE / "rlinf.log"))  # By the tasks' numbers.
    assert (rlinf.result("greedy", STOVE).gained, rlinf.result("greedy", DRAWER).lost) == (3, 1)
    theirs = compare_any(read_evaluation(HERE / "rlinf.log"), read_evaluation(HERE / "simplevla_rollouts.log"))
    assert theirs.result(AS_RUN).num_pairs == 8


def test_states_that_are_not_named_do_not_pair(eval_info: Path):
    ours = make({DRAWER: [1] * 60, STOVE: [1] * 60}, mode="greedy", labels=LABELS, official_states=True)
    comparison = compare_any(read_evaluation(eval_info), ours)
    result = comparison.result("greedy")
    assert result.apart == (12, 120) and (result.rate_a, result.rate_b) == (0.5, 1.0)
    assert result.p_value_by_state < 1e-6 and result.bootstrap.low > 0
    assert comparison.population.startswith("not paired: eval_info names no initial states")
    assert "Fisher p" in comparison.text() and comparison.result("greedy", STOVE).apart == (6, 60)
    drawn = make({DRAWER: [1] * 6, STOVE: [1] * 6}, mode="greedy", labels=LABELS, official_states=False)
    apart = compare_any(read_evaluation(HERE / "vla_eval.json"), drawn)  # Their state 3 is not our state 3.
    assert apart.result("greedy").apart == (13, 12) and "no initial state in common" in apart.population
    table = compare_any(read_evaluation(HERE / "rlinf_table.log"), ours)
    assert table.result("greedy").apart == (48, 120) and "no task of one is known by name" in table.text()


def test_the_commands_take_their_files(eval_info: Path, tmp_path: Path):
    make({DRAWER: [1] * 60, STOVE: [1] * 60}, mode="greedy", labels=LABELS).save(tmp_path / "ours.json")
    compared = CliRunner().invoke(app, ["compare", str(eval_info), str(tmp_path / "ours.json"), "--margin", "5"])
    assert compared.exit_code == 0, compared.output
    assert "not paired" in compared.stdout and "greedy: b is better: +50.0 points" in compared.stdout
    turned = CliRunner().invoke(app, ["compare", str(tmp_path / "ours.json"), str(eval_info)])
    assert turned.stdout.endswith(f"\nnext, task by task: vla-rl report {eval_info}\n"), turned.stdout
    reported = CliRunner().invoke(app, ["report", str(eval_info)])
    assert reported.exit_code == 0, reported.output
    page = eval_info.with_suffix(".html").read_text()
    assert "As run success of eval_info is 50.0 %" in page and "does not name its initial states" in page
    assert CliRunner().invoke(app, ["report", f"{HERE / 'simplevla_run.log'}"]).exit_code == 2
