"""The environment from a config: where episodes begin, what trust must say, real networks, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from test_model import SMALL, small_world_model
from toy import METADATA, start_position, through_a_file, toy_env_spec

from vla_rl.config import ConfigError, build_component
from vla_rl.data.config import DatasetError
from vla_rl.evaluation.statistics import Figure
from vla_rl.types import EpisodeSpec, Keyframe, Observation
from vla_rl.workflows.world_model import imagined_env
from world_model.config import ImaginationConfig
from world_model.data.initial_frames import MAX_KEPT, RecordedInitialFrames, SimulatedInitialFrames, check_alike
from world_model.env.config import WorldModelEnvConfig
from world_model.env.env import WorldModelEnv
from world_model.metadata import METADATA_FILE, WorldModelMetadata, content_key, read_metadata
from world_model.model.parts import build_parts
from world_model.model.world_model import WorldModel
from world_model.noise import RepeatCounter
from world_model.trust.config import DEFAULT_REQUIRE, MeasureConfig
from world_model.trust.report import TRUST_FILE, Provenance, TrustError, TrustReport

SPEC = EpisodeSpec("reach", "train", 1)


# --- first frames ---------------------------------------------------------------------------


class FakeSimulator:
    """Shows `start_position`; counts its resets."""

    def __init__(self, **changes: Any) -> None:
        self.num_envs, self.spec = 3, toy_env_spec(**changes)
        self.calls: list[int] = []
        self.num_closed = 0

    def reset(self, specs: list[EpisodeSpec], env_ids: list[int]) -> Observation:
        assert list(env_ids) == list(range(len(specs)))
        self.calls.append(len(specs))
        position = np.array([start_position(spec) for spec in specs], np.float32)
        images = np.broadcast_to((8 * position)[:, None, None, None], (len(specs), 8, 8, 3)).astype(np.uint8)
        state = np.stack([position, position], 1)
        return Observation({"wrist": images, "agentview": images}, state, ["x"] * len(specs))

    def close(self) -> None:
        self.num_closed += 1


def test_a_group_is_rendered_once() -> None:
    simulator = FakeSimulator()
    frames = SimulatedInitialFrames(cast(Any, simulator))
    specs = [EpisodeSpec("reach", "train", i) for i in (0, 1, 0, 2, 3, 0)]
    expected = [1 + i / 8 for i in (0, 1, 0, 2, 3, 0)]
    assert frames.observe(specs).state[:, 0].tolist() == expected
    assert simulator.calls == [3, 1]
    assert frames.observe(specs[::-1]).state[:, 0].tolist() == expected[::-1]
    assert simulator.calls == [3, 1]
    keyframes = [Keyframe("sim", "reach", 3, {"position": np.array(p)}) for p in (5.0, 6.0)]
    stored = [replace(SPEC, keyframe=k) for k in (*keyframes, keyframes[0])]
    assert frames.observe([SPEC, *stored]).state[:, 0].tolist() == [1.125, 5, 6, 5]
    assert simulator.calls == [3, 1, 2]
    frames.observe([EpisodeSpec("reach", "eval", i) for i in range(MAX_KEPT)])
    num_calls = len(simulator.calls)
    frames.observe(specs)  # Forgotten, and rendered again.
    assert len(simulator.calls) == num_calls + 2
    frames.close()
    assert simulator.num_closed == 1


def dataset(names: list[str], instructions: list[str], first: float = 0.0) -> Any:
    """Episodes of two rows each."""
    rows = 2 * len(names)
    images = (first + np.arange(rows, dtype=np.float32))[:, None, None, None] * np.ones((8, 8, 3), np.uint8)
    return SimpleNamespace(
        path=Path("data"),
        initial_states=names,
        instructions=instructions,
        task=np.repeat(np.arange(len(names)) % len(instructions), 2),
        starts=np.arange(0, rows, 2),
        episodes=np.arange(len(names)),
        images={"agentview": images.astype(np.uint8), "wrist": images.astype(np.uint8)},
        state=np.arange(2 * rows, dtype=np.float32).reshape(rows, 2),
    )


def test_recorded_episodes_begin_where_they_began() -> None:
    recorded = dataset(["reach/train/40", "reach/eval/0", "reach_back/train/40"], ["go", "come", "turn"])
    frames = RecordedInitialFrames([recorded], METADATA.tasks)
    obs = frames.observe([EpisodeSpec("reach_back", "train", 40), EpisodeSpec("reach", "train", 40)])
    assert obs.images["wrist"][:, 0, 0, 0].tolist() == [4, 0] and obs.instruction == ["turn", "go"]
    np.testing.assert_array_equal(obs.state, recorded.state[[4, 0]])
    with pytest.raises(ValueError, match=r"reach/train/41; .* 1, numbered 40 to 40.*sampling\.first_state"):
        frames.observe([EpisodeSpec("reach", "train", 41)])
    with pytest.raises(ValueError, match="are none"):
        frames.observe([EpisodeSpec("reach", "validation", 0)])
    with pytest.raises(ValueError, match=r"env\.first_frames"):
        frames.observe([replace(SPEC, keyframe=Keyframe("tabletop", "reach", 0, {}))])


def test_episodes_of_other_sources_are_numbered_by_instruction() -> None:
    texts = list(METADATA.tasks.values())
    parts = [dataset([f"robot/{i}" for i in range(4)], texts), dataset(["robot/0"], texts, first=100)]
    frames = RecordedInitialFrames(parts, METADATA.tasks)
    specs = [EpisodeSpec("reach", "train", i) for i in range(3)]
    assert frames.observe(specs).images["wrist"][:, 0, 0, 0].tolist() == [0, 4, 100]
    with pytest.raises(DatasetError, match="no episode of task 'reach_back'"):
        RecordedInitialFrames(parts[1:], METADATA.tasks)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cameras": ("wrist",)}, r"env\.first_frames lacks \['agentview'\]"),
        ({"image_size": (16, 16)}, r"image size: the world model has \(8, 8\), env\.first_frames has \(16, 16\)"),
        ({"control_hz": 20.0}, r"control Hz: the world model has 10\.0, env\.first_frames has 20\.0"),
        ({"action_dim": 4, "action_low": -np.ones(4), "action_high": np.ones(4)}, "action dimensions: .* 3, .* 4"),
        ({"state_dim": 8}, "state dimensions"),
        ({"action_high": np.full(3, 0.5)}, "action bounds"),
        ({"tasks": {"reach": "x"}, "horizon": {"reach": 3}}, r"has no \['reach_back'\]"),
    ],
)
def test_first_frames_of_another_robot_are_refused(changes: dict[str, Any], message: str) -> None:
    check_alike(METADATA, toy_env_spec(), list(METADATA.tasks))
    check_alike(METADATA, toy_env_spec(cameras=("front", "wrist", "agentview")), list(METADATA.tasks))
    with pytest.raises(ConfigError, match=message):
        check_alike(METADATA, toy_env_spec(**changes), list(METADATA.tasks))


# --- built from a config ----------------------------------------------------------------------


DUMMY = {"kind": "sim.dummy:DummyConfig", "image_size": 16, "cameras": ["agentview", "wrist"], "horizon": 12}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A world model of the dummy simulator, untrained."""
    spec = cast(Any, build_component("env", DUMMY)).env_spec()
    metadata = WorldModelMetadata.of(spec, np.zeros(8), np.ones(8), success_threshold=1e6)
    torch.manual_seed(0)
    WorldModel(SMALL, metadata, build_parts(SMALL, metadata)).save(tmp_path / "model")
    return tmp_path / "model"


def section(folder: Path, **changes: Any) -> dict[str, Any]:
    values = {"kind": "world_model", "path": str(folder), "first_frames": DUMMY, "num_envs": 2, "device": "cpu"}
    return {**values, "trust": {"ignore": True}, **changes}


@pytest.mark.parametrize(
    ("reward", "require", "expected"),
    [
        ("success", {}, "refuse"),
        ("probability", {}, "warn"),
        ("objects", {"informedness": {"above": 0.2}}, "refuse"),
        ("probability", {"informedness": {"otherwise": "refuse"}}, "refuse"),
    ],
)
def test_what_a_threshold_tells_apart_refuses_only_where_one_is_used(
    folder: Path, reward: str, require: dict[str, Any], expected: str
) -> None:
    made = WorldModelEnvConfig.model_validate(
        section(folder, imagination={"reward": reward, "dual_noise": 0}, trust={"require": require})
    )
    assert made.trust.require["informedness"].otherwise == expected
    again = WorldModelEnvConfig.model_validate(made.model_dump(mode="json"))
    assert again.trust == made.trust, "a run's own recipe says the same"


@pytest.mark.parametrize(
    ("changes", "real", "reason", "bound"),
    [
        ({"trust": {}}, DUMMY, "", 0.2),
        ({"trust": {"require": {"acting_gap": {"at_most": 0.3}}}}, DUMMY, "", 0.3),
        ({"trust": {"require": {"acting_gap": {"otherwise": "warn"}}}}, DUMMY, "", None),
        ({"trust": {"require": {"acting_gap": None}}}, DUMMY, "", None),
        ({"trust": {"ignore": True}}, DUMMY, "", None),
        ({"first_frames": None, "datasets": "data"}, DUMMY, "they begin as recorded episodes did (env.datasets)", None),
        ({}, {"kind": "robot", "contract": "so101", "instructions": ["go"]}, "robot is not known as a simulator", None),
        ({}, {"kind": "tabletop"}, "they begin in dummy, and real episodes in tabletop", None),
        ({"imagination": {"branch_frames": 2}}, DUMMY, "branches (branch_frames) end before their outcome", None),
    ],
)
def test_actions_are_executed_in_the_simulator_of_the_first_frames_alone(
    folder: Path, changes: dict[str, Any], real: dict[str, Any], reason: str, bound: float | None
) -> None:
    made = WorldModelEnvConfig.model_validate(section(folder, **changes))
    assert made.why_not_executed(cast(Any, build_component("env", real))) == reason and made.most_flattery == bound


def build(folder: Path, **changes: Any) -> WorldModelEnv:
    return cast(Any, build_component("env", section(folder, **changes))).build()


def test_real_networks_keep_the_contract(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2])
    from checks import check_vec_env

    config = build_component("env", section(folder))
    monkeypatch.setattr(RepeatCounter, "next", lambda *_: 0)  # An initial state always has the same noise.
    check_vec_env(cast(Any, config).build)


def test_a_section_comes_back_from_its_own_dump(folder: Path) -> None:
    config = build_component("env", section(folder))
    assert isinstance(config, WorldModelEnvConfig) and config.is_imagined
    assert build_component("env", config.model_dump(mode="json")) == config
    moved = config.model_copy(update={"path": folder.parent})
    assert moved.model_dump(mode="json")["path"] == str(folder.parent)


def test_the_spec_needs_no_weights(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        file.unlink()
    config = cast(Any, build_component("env", section(folder, tasks=["reach_red"], imagination={"horizon": 8})))
    spec = config.env_spec()
    assert spec.kind == "world_model" and spec.horizon == {"reach_red": 8} and spec.cameras == ("agentview", "wrist")
    shorter = section(folder, first_frames=DUMMY | {"horizon": 6})
    assert set(cast(Any, build_component("env", shorter)).env_spec().horizon.values()) == {6}


def test_no_tasks_named_are_those_that_the_simulator_has_too(folder: Path) -> None:
    one = WorldModelEnvConfig.model_validate(section(folder, first_frames=DUMMY | {"tasks": ["reach_red"]}))
    assert list(one.env_spec().tasks) == ["reach_red"] != list(read_metadata(folder)[1].tasks)
    named = one.model_copy(update={"tasks": ("reach_blue",)})
    with pytest.raises(ConfigError, match=r"tasks: env\.first_frames has no \['reach_blue'\]"):
        named.env_spec()


def test_without_trust_nothing_is_built(folder: Path) -> None:
    with pytest.raises(TrustError, match=r"trust\.json.*trust\.ignore=true"):
        build(folder, trust={})
    (folder / "trust.json").write_text("{")
    with pytest.raises(TrustError, match="not valid JSON"):
        build(folder, trust={})
    env = build(folder)
    assert env.admission is not None and env.admission.ignored and "not valid JSON" in env.admission.problem
    env.close()


def test_trust_must_be_about_these_weights_and_high_enough(folder: Path) -> None:
    def report(horizon: float, key: str) -> None:
        TrustReport(
            created="2026-01-01T00:00:00",
            provenance=Provenance(model_key=key),
            config=MeasureConfig(),
            frame_steps=4,
            figures={"trust_horizon": Figure(value=horizon, n=200)},
        ).save(folder / TRUST_FILE)

    only = {"require": dict.fromkeys(DEFAULT_REQUIRE) | {"trust_horizon": {"above": 8.0}}}
    report(12, content_key(folder))
    env = build(folder, trust=only)
    assert env.admission is not None and not env.admission.ignored and env.admission.verdicts[0].passed
    env.close()
    report(8, content_key(folder))
    with pytest.raises(TrustError, match="cannot be trusted enough"):
        build(folder, trust=only)
    report(12, "of older weights")
    with pytest.raises(TrustError, match="another world model"):
        build(folder, trust=only)
    env = build(folder, trust={**only, "ignore": True})
    assert env.admission is not None and env.admission.ignored
    env.close()


def test_a_measured_horizon_of_0_is_no_missing_limit(folder: Path) -> None:
    figures = {"skill": Figure(value=0.5, n=200)}

    def report(**more: Figure) -> None:
        provenance = Provenance(model_key=content_key(folder))
        TrustReport(
            created="2026-01-01T00:00:00",
            provenance=provenance,
            config=MeasureConfig(),
            frame_steps=4,
            figures=figures | more,
        ).save(folder / TRUST_FILE)

    report(trust_horizon=Figure(value=0, n=200))
    asks_nothing = {"require": dict.fromkeys(DEFAULT_REQUIRE)}
    for trust in (asks_nothing, {"ignore": True}):
        with pytest.raises(TrustError, match=r"env\.imagination\.horizon: got null.* is 0 control steps .*horizon=N"):
            build(folder, trust=trust)
    env = build(folder, trust=asks_nothing, imagination={"horizon": 8})
    assert env.config.horizon == 8
    env.close()
    config = cast(WorldModelEnvConfig, build_component("env", section(folder)))
    measured = imagined_env(cast(Any, SimpleNamespace(env=config)), folder)
    assert measured.admitted()[1] == max(config.env_spec().horizon.values()), "measured anew, whatever it says"
    report()
    env = build(folder, trust=asks_nothing)
    assert env.config.horizon is None, "where none was measured, none is set"
    env.close()


def test_branches_that_imagined_episodes_are_too_short_for_are_refused_before_a_worker_is_started(folder: Path) -> None:
    """A horizon that was measured is a matter of trust: another fit may have a longer one."""
    file = folder / METADATA_FILE
    values = json.loads(file.read_text())
    file.write_text(json.dumps(values | {"facts": values["facts"] | {"value_probability": [1.0, 0.0]}}))
    TrustReport(
        created="2026-01-01T00:00:00",
        provenance=Provenance(model_key=content_key(folder)),
        config=MeasureConfig(),
        frame_steps=4,
        figures={"trust_horizon": Figure(value=8, n=200)},
    ).save(folder / TRUST_FILE)

    def elsewhere(**imagination: Any) -> Any:
        return cast(WorldModelEnvConfig, build_component("env", section(folder, imagination=imagination)))

    frames = 8 // SMALL.frame_steps
    assert elsewhere(branch_frames=frames).build_elsewhere().spec.horizon["reach_red"] == 8
    message = rf"branch_frames: got {frames + 1}, {frames + 1} frames of .* after 8 "
    with pytest.raises(TrustError, match=message):
        elsewhere(branch_frames=frames + 1).build_elsewhere()
    with pytest.raises(ConfigError, match=message):
        elsewhere(branch_frames=frames + 1, horizon=8).build_elsewhere()


def test_what_does_not_fit_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"lacks \['wrist'\]"):
        build(folder, first_frames=DUMMY | {"cameras": ["agentview"]})
    with pytest.raises(ConfigError, match="image size"):
        build(folder, first_frames=DUMMY | {"image_size": 32})
    with pytest.raises(ConfigError, match="Did you mean 'reach_red'"):
        build(folder, tasks=["reach_rad"])
    with pytest.raises(ConfigError, match="no such folder"):
        build(folder / "nowhere")
    with pytest.raises(ValueError, match="num_envs"):
        WorldModelEnv(small_world_model(), cast(Any, None), ImaginationConfig(), 0)


def test_episodes_begin_in_one_place(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"env\.first_frames: .* got neither"):
        build(folder, first_frames=None)
    with pytest.raises(ConfigError, match="got both"):
        build(folder, datasets="somewhere")
    with pytest.raises(ConfigError, match="must be a real environment"):
        build(folder, first_frames=section(folder))
    with pytest.raises(DatasetError, match="somewhere"):
        build(folder, first_frames=None, datasets="somewhere")


def test_keyframes_keep_what_numpy_does_not_know(folder: Path) -> None:
    env = build(folder)
    cast(torch.nn.Module, env.world_model.dynamics).to(torch.bfloat16)
    spec, ahead = EpisodeSpec("reach_red", "train", 1), np.full((1, 4, 7), 0.5, np.float32)
    env.reset([spec], [0])
    env.step(ahead, [0])
    keyframe = through_a_file(env.save_state([0])[0])
    assert any(name.endswith(":bfloat16") for name in keyframe.arrays)
    expected = env.step(ahead, [0])
    env.reset([replace(spec, keyframe=keyframe)], [1])
    np.testing.assert_array_equal(env.step(ahead, [1]).obs.state, expected.obs.state)
    env.close()
