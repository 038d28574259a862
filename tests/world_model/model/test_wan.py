"""Wan as the dynamics, on tiny random weights: causality, conditioning, learning, files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from vla_rl.config import ConfigError, validate
from world_model.config import StageConfig, WorldModelConfig
from world_model.fit.stage import stage_trainer
from world_model.model.dynamics import TransformerConfig
from world_model.model.flow import mix
from world_model.model.wan import WanConfig, WanContext, WanDynamics
from world_model.noise import NoiseStream
from world_model.types import Actions, Clip, Frames

diffusers = pytest.importorskip("diffusers")

SHAPE = (4, 4, 4)  # C, h, w
STATE_DIM, ACTION_DIM, FRAME_STEPS = 3, 2, 4
SIZES: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": SHAPE[0],
    "out_channels": SHAPE[0],
    "text_dim": 16,
    "freq_dim": 16,
    "ffn_dim": 48,
    "num_layers": 2,
}


def make_dynamics(
    views: int = 1, sizes: dict[str, Any] | None = None, trained: bool = True, **options: Any
) -> WanDynamics:
    """`trained`: with noise on all weights, so that what starts at zero has its effect as well."""
    torch.manual_seed(0)
    source = {} if "path" in options else {"transformer": SIZES | (sizes or {})}
    config = WanConfig.model_validate(
        {"dtype": "float32", "memory": 2, "sampling_steps": 2, "gradient_checkpointing": False, **source, **options}
    )
    dynamics = WanDynamics(config, SHAPE, views, STATE_DIM, ACTION_DIM, FRAME_STEPS)
    if trained:
        for parameter in dynamics.parameters():
            parameter.data += 0.1 * torch.randn(parameter.shape).to(parameter.dtype)
    return dynamics


def make_clip(batch: int, length: int, views: int = 1, seed: int = 0) -> Clip:
    g = torch.Generator().manual_seed(seed)
    executed = torch.ones(batch, length, FRAME_STEPS, dtype=torch.bool)
    executed[:, 0] = False
    values = torch.randn(batch, length, FRAME_STEPS, ACTION_DIM, generator=g).clamp(-1, 1) * executed[..., None]
    latents = torch.randn(batch, length, views, *SHAPE, generator=g)
    return Clip(
        Frames(latents, torch.randn(batch, length, STATE_DIM, generator=g)),
        Actions(values, executed),
        torch.ones(batch, dtype=torch.int64),
        torch.ones(batch, length, dtype=torch.bool),
        torch.zeros(batch, length, dtype=torch.bool),
        ["push the block"] * batch,
    )


def random_levels(batch: int, length: int) -> torch.Tensor:
    return torch.rand(batch, length, generator=torch.Generator().manual_seed(5))


def predict(dynamics: WanDynamics, clip: Clip, levels: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The network's velocity and states, the clip's frames taken for noisy ones."""
    levels = random_levels(*clip.valid.shape) if levels is None else levels
    return dynamics.network(clip.frames.latents, clip.frames.states, levels, clip.actions, clip.valid)


def changed_at(before: tuple[torch.Tensor, torch.Tensor], after: tuple[torch.Tensor, torch.Tensor]) -> list[int]:
    """Numbers of the frames in which two predictions differ at all."""
    differs = [(a != b).flatten(2).any(2).any(0) for a, b in zip(before, after, strict=True)]
    return torch.nonzero(differs[0] | differs[1]).flatten().tolist()


def stock_velocity(dynamics: WanDynamics, clip: Clip, levels: torch.Tensor) -> torch.Tensor:
    """What diffusers' own, bidirectional forward pass makes of the same weights, for text of zeros."""
    transformer = dynamics.network.transformer
    stock = diffusers.WanTransformer3DModel.from_config(transformer.config)
    stock.load_state_dict(transformer.state_dict())
    latents = clip.frames.latents  # (B, T, V, C, h, w)
    wide = torch.cat(list(latents.unbind(2)), -1).transpose(1, 2)
    tokens = (SHAPE[1] // 2) * (latents.shape[2] * SHAPE[2] // 2)
    timestep = (1000 * levels).repeat_interleave(tokens, 1)
    text = torch.zeros(len(latents), FRAME_STEPS, SIZES["text_dim"])
    velocity = stock(wide, timestep, text, return_dict=False)[0].transpose(1, 2)
    return torch.stack(velocity.chunk(latents.shape[2], -1), 2)


@torch.no_grad()
def test_before_training_it_is_the_pretrained_model() -> None:
    levels = random_levels(2, 3)
    # One frame: causal is bidirectional. One layer: the last frame sees the same in both.
    deep, clip = make_dynamics(trained=False), make_clip(2, 1)
    torch.testing.assert_close(
        predict(deep, clip, levels[:, :1])[0], stock_velocity(deep, clip, levels[:, :1]), atol=1e-5, rtol=1e-4
    )
    shallow, clip = make_dynamics(views=2, sizes={"num_layers": 1}, trained=False), make_clip(2, 3, views=2)
    velocity, states = predict(shallow, clip, levels)
    expected = stock_velocity(shallow, clip, levels)
    torch.testing.assert_close(velocity[:, -1], expected[:, -1], atol=1e-5, rtol=1e-4)
    assert not torch.allclose(velocity[:, 0], expected[:, 0], atol=1e-3)  # The stock model looks ahead.
    assert states.shape == (2, 3, STATE_DIM) and (states == 0).all()


@torch.no_grad()
@pytest.mark.parametrize("what", ["actions", "latents", "states", "levels"])
def test_a_later_frame_or_action_never_changes_an_earlier_prediction(what: str) -> None:
    dynamics, clip = make_dynamics(views=2), make_clip(2, 5, views=2)
    levels = random_levels(2, 5)
    before = predict(dynamics, clip, levels)
    frames, actions = clip.frames, clip.actions
    other = make_clip(2, 5, views=2, seed=1)

    def swapped(mine: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
        return torch.cat([mine[:, :3], theirs[:, 3:4], mine[:, 4:]], 1)

    if what == "actions":
        actions = Actions(swapped(actions.values, other.actions.values), actions.executed)
    elif what == "latents":
        frames = Frames(swapped(frames.latents, other.frames.latents), frames.states)
    elif what == "states":
        frames = Frames(frames.latents, swapped(frames.states, other.frames.states))
    else:
        levels = swapped(levels, 1 - levels)
    after = predict(dynamics, replace(clip, frames=frames, actions=actions), levels)
    assert changed_at(before, after) == [3, 4]


@torch.no_grad()
@pytest.mark.parametrize("off", ["embed_actions", "embed_word"])
def test_each_action_of_a_frame_has_its_effect_both_ways(off: str) -> None:
    dynamics, clip = make_dynamics(), make_clip(1, 3)
    network = dynamics.network
    getattr(network, off)[-1].weight.zero_()
    before = predict(dynamics, clip)[0]
    for step in range(FRAME_STEPS):
        values = clip.actions.values.clone()
        values[:, 1, step, 1] += 0.5
        after = predict(dynamics, replace(clip, actions=Actions(values, clip.actions.executed)))[0]
        assert not torch.equal(before[:, 1], after[:, 1]), f"action {step} does nothing"
    order = torch.tensor([1, 0, 2, 3])  # The same actions in another order are other actions.
    swapped = Actions(clip.actions.values[:, :, order], clip.actions.executed)
    assert (predict(dynamics, replace(clip, actions=swapped))[0] - before)[:, 1].abs().max() > 1e-5
    ignored = Actions(clip.actions.values + (~clip.actions.executed)[..., None], clip.actions.executed)
    assert torch.equal(predict(dynamics, replace(clip, actions=ignored))[0], before)


@torch.no_grad()
def test_empty_places_change_nothing() -> None:
    dynamics, clip = make_dynamics(), make_clip(2, 3)
    levels = random_levels(2, 3)
    velocity, states = predict(dynamics, clip, levels)
    junk = make_clip(2, 2, seed=7)
    padded = dynamics.network(
        torch.cat([junk.frames.latents, clip.frames.latents], 1),
        torch.cat([junk.frames.states, clip.frames.states], 1),
        torch.cat([random_levels(2, 2), levels], 1),
        Actions(
            torch.cat([junk.actions.values, clip.actions.values], 1),
            torch.cat([junk.actions.executed, clip.actions.executed], 1),
        ),
        torch.tensor([[False, False, True, True, True]] * 2),
    )
    torch.testing.assert_close(padded[0][:, 2:], velocity, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(padded[1][:, 3:], states[:, 1:], atol=1e-5, rtol=1e-4)


def begun(dynamics: WanDynamics, clip: Clip, num_more: int, seed: int = 0) -> tuple[WanContext, NoiseStream]:
    """The context after a clip's first frames."""
    noise = NoiseStream([seed + i for i in range(clip.size)])
    context = dynamics.begin(clip.frames.at(slice(0, 1)), noise)
    more = slice(1, 1 + num_more)
    return dynamics.extend(context, clip.frames.at(more), clip.actions.at(more), noise), noise


def test_context_keeps_the_reference_and_the_last_frames() -> None:
    dynamics, clip = make_dynamics(memory=2), make_clip(2, 6)
    for num_more, kept in ((0, [0]), (1, [0, 1]), (2, [0, 1, 2]), (3, [0, 2, 3]), (5, [0, 4, 5])):
        context, _ = begun(dynamics, clip, num_more)
        assert context.filled.sum(1).tolist() == [len(kept)] * 2
        assert torch.equal(context.frames.latents[:, -len(kept) :], clip.frames.latents[:, kept])
        assert torch.equal(context.frames.states[:, -len(kept) :], clip.frames.states[:, kept])
        assert torch.equal(context.actions.values[:, -len(kept) :], clip.actions.values[:, kept])
    short, _ = begun(dynamics, clip, 1)
    mixed = context.put(torch.tensor([1]), short.select(torch.tensor([0])))
    assert mixed.filled.sum(1).tolist() == [3, 2]
    assert torch.equal(mixed.frames.latents[0], context.frames.latents[0])
    assert torch.equal(mixed.frames.latents[1], short.frames.latents[0])
    newest = clip.frames.at(slice(5, 6)).states[:, 0]
    more = dynamics.extend(mixed, clip.frames.at(slice(5, 6)), clip.actions.at(slice(5, 6)), NoiseStream([0, 1]))
    assert torch.equal(more.frames.states[0], torch.stack([clip.frames.states[0, 0], newest[0], newest[0]]))
    assert torch.equal(more.frames.states[1], torch.cat([clip.frames.states[0, :2], newest[1:]]))
    again = WanContext.from_tensors(mixed.tensors())
    assert all(torch.equal(a, b) for a, b in zip(again.tensors().values(), mixed.tensors().values(), strict=True))


def test_imagination_is_causal_repeatable_and_stochastic() -> None:
    dynamics, clip = make_dynamics(views=2), make_clip(2, 6, views=2)
    new = clip.actions.at(slice(3, 6))

    def imagine(actions: Actions, seed: int = 0) -> Frames:
        return dynamics.imagine(*(begun(dynamics, clip, 2, seed)[:1]), actions, NoiseStream([seed, seed + 1]))

    frames = imagine(new)
    assert frames.latents.shape == (2, 3, 2, *SHAPE) and frames.states.shape == (2, 3, STATE_DIM)
    again = imagine(new)
    assert torch.equal(frames.latents, again.latents) and torch.equal(frames.states, again.states)
    values = new.values.clone()
    values[:, 2] *= -1
    other = imagine(Actions(values, new.executed))
    assert changed_at((frames.latents, frames.states), (other.latents, other.states)) == [2]
    fewer = imagine(new.at(slice(0, 2)))
    torch.testing.assert_close(fewer.latents, frames.latents[:, :2], atol=1e-5, rtol=1e-4)
    assert (imagine(new, seed=3).latents - frames.latents).abs().min() > 0


def test_batch_equals_single_with_contexts_of_different_length() -> None:
    dynamics, clip = make_dynamics(), make_clip(3, 6)
    long, _ = begun(dynamics, clip, 3)
    short, _ = begun(dynamics, clip, 1)
    context = long.put(torch.tensor([1]), short.select(torch.tensor([1])))
    new = clip.actions.at(slice(4, 6))
    together = dynamics.imagine(context, new, NoiseStream([10, 11, 12]))
    for row in range(3):
        rows = torch.tensor([row])
        alone = dynamics.imagine(context.select(rows), new.select(rows), NoiseStream([10 + row]))
        torch.testing.assert_close(alone.latents[0], together.latents[row], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(alone.states[0], together.states[row], atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_one_step_of_imagination_is_what_training_predicts() -> None:
    dynamics, clip = make_dynamics(context_noise=0.0), make_clip(1, 4)
    context, _ = begun(dynamics, clip, 2)
    imagined = dynamics.imagine(context, clip.actions.at(slice(3, 4)), NoiseStream([4]), num_steps=1)
    noise = NoiseStream([4]).frames(clip.frames, 4)  # 3 of the context, then the new.
    noisy = mix(clip.frames, noise, torch.tensor([[0.0, 0.0, 0.0, 1.0]]))
    velocity, states = predict(dynamics, replace(clip, frames=noisy.frames), noisy.levels)
    torch.testing.assert_close(imagined.latents[:, 0], (noise.latents - velocity)[:, 3], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(imagined.states[:, 0], states[:, 3], atol=1e-5, rtol=1e-4)


def test_context_and_wanted_frames_of_training_clips() -> None:
    dynamics, clip = make_dynamics(memory=2, context_noise=0.05), make_clip(200, 6)
    first, valid = clip.first.clone(), clip.valid.clone()
    first[100:] = 4
    valid[::2, 4:] = False
    generator = torch.Generator().manual_seed(0)
    levels, wanted = dynamics._drawn_levels(replace(clip, first=first, valid=valid), generator)
    start = wanted.long().argmax(1)
    assert not wanted[~valid].any() and wanted.any(1).all()
    assert set(start[:100].tolist()) == {1, 2, 3} and set(start[100:].tolist()) == {2, 3}
    context = torch.arange(6) < start[:, None]
    assert levels[context].max() <= 0.1 and levels[wanted].max() > 0.98 and levels[wanted].min() < 0.1
    assert wanted[torch.arange(200), start].all() and (wanted | context | ~valid).all()


def taught_clip(batch: int, generator: torch.Generator) -> Clip:
    """Episodes in which the sign of a frame's actions decides what is seen, on a fixed pattern."""
    clip = make_clip(batch, 4, seed=3)
    side = torch.randint(2, (batch, 4), generator=generator) * 2.0 - 1
    side[:, 0] = 0
    pattern = torch.linspace(-1, 1, SHAPE[0] * SHAPE[1] * SHAPE[2]).view(1, 1, 1, *SHAPE)
    latents = pattern * side[:, :, None, None, None, None]
    values = side[:, :, None, None].expand(clip.actions.values.shape).clone()
    states = side[..., None].expand(clip.frames.states.shape).clone()
    return replace(clip, frames=Frames(latents, states), actions=Actions(values, clip.actions.executed))


def test_it_learns_to_follow_actions() -> None:
    dynamics = make_dynamics(trained=False)
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(dynamics.parameters(), lr=5e-3)
    errors = []
    for _ in range(50):
        loss, metrics = dynamics.loss(taught_clip(8, generator), generator)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        errors.append(metrics["velocity_error"])
    assert sum(errors[-10:]) < 0.4 * sum(errors[:10])
    clip = taught_clip(8, generator)
    context = dynamics.begin(clip.frames.at(slice(0, 1)), NoiseStream(range(8)))
    imagined = dynamics.imagine(context, clip.actions.at(slice(1, 3)), NoiseStream(range(8)), num_steps=4)
    agreement = (imagined.latents * clip.frames.latents[:, 1:3]).flatten(2).mean(2)
    assert (agreement > 0).float().mean() > 0.9
    assert (imagined.states * clip.frames.states[:, 1:3] > 0).float().mean() > 0.9


def test_checkpointing_gives_the_same_gradients() -> None:
    clip = make_clip(2, 4)
    gradients = []
    for checkpointing in (False, True):
        dynamics = make_dynamics(gradient_checkpointing=checkpointing)
        dynamics.loss(clip, torch.Generator().manual_seed(1))[0].backward()
        gradients.append([p.grad for p in dynamics.parameters() if p.grad is not None])
    assert len(gradients[0]) > 50
    for plain, again in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, again)


def publish(folder: Path, **declared: Any) -> Path:
    """A pipeline's folder as diffusers publishes it, the transformer's weights in several files."""
    torch.manual_seed(1)
    stock = diffusers.WanTransformer3DModel(**SIZES)
    stock.save_pretrained(folder / "transformer", max_shard_size="30KB")
    config = folder / "transformer" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | declared))
    assert len(list((folder / "transformer").glob("*.safetensors"))) > 1
    return folder


@torch.no_grad()
def test_loads_sharded_weights_in_the_published_layout(tmp_path: Path) -> None:
    folder = publish(tmp_path, added_kv_proj_dim=24, image_dim=10)
    torch.manual_seed(1)
    stock = diffusers.WanTransformer3DModel(**SIZES)
    dynamics = make_dynamics(path=folder, trained=False, dtype="bfloat16")
    loaded = dynamics.network.transformer
    assert loaded.blocks[0].attn1.to_q.weight.dtype == torch.bfloat16
    assert loaded.blocks[0].scale_shift_table.dtype == loaded.rope.freqs_cos.dtype == torch.float32
    mine, theirs = loaded.state_dict(), stock.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name].to(mine[name].dtype)) for name in theirs)
    clip = make_clip(2, 1)
    velocity, _ = predict(dynamics, clip, torch.full((2, 1), 0.5))
    assert velocity.dtype == torch.float32
    exact = stock_velocity(make_dynamics(path=folder / "transformer", trained=False), clip, torch.full((2, 1), 0.5))
    torch.testing.assert_close(velocity, exact, atol=0.05, rtol=0.05)


def reloaded(dynamics: WanDynamics, file: Path) -> WanDynamics:
    """As a world model's folder keeps it: the config as JSON, the state dict as safetensors."""
    save_file({name: tensor.clone().contiguous() for name, tensor in dynamics.state_dict().items()}, file)
    values = json.loads(json.dumps(dynamics.config.model_dump(mode="json")))
    again = WanDynamics(
        validate(WanConfig, values), SHAPE, dynamics.network.num_views, STATE_DIM, ACTION_DIM, FRAME_STEPS
    )
    again.load_state_dict(load_file(file))
    return again


@torch.no_grad()
@pytest.mark.parametrize(
    "options", [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "lora_rank": 2}]
)
def test_config_and_state_dict_are_all_it_takes(tmp_path: Path, options: dict[str, Any]) -> None:
    folder = publish(tmp_path / "base")
    dynamics, clip = make_dynamics(views=2, path=folder, **options), make_clip(2, 3, views=2)
    folder.rename(tmp_path / "gone")
    assert dynamics.config.path is None
    loaded = reloaded(dynamics, tmp_path / "dynamics.safetensors")
    assert loaded.config == dynamics.config and loaded.frame_steps == FRAME_STEPS
    for mine, theirs in zip(predict(loaded, clip), predict(dynamics, clip), strict=True):
        assert torch.equal(mine, theirs)


def test_lora_trains_adapters_and_what_is_added(tmp_path: Path) -> None:
    base, clip = publish(tmp_path / "base"), make_clip(2, 4)
    plain, dynamics = (
        make_dynamics(path=base, trained=False, lora_rank=rank, dtype="bfloat16", gradient_checkpointing=True)
        for rank in (0, 2)
    )
    for mine, theirs in zip(predict(dynamics, clip), predict(plain, clip), strict=True):
        torch.testing.assert_close(mine, theirs)
    before = {name: p.detach().clone() for name, p in dynamics.named_parameters()}
    adapters = {name for name in before if ".lora_" in name}
    assert len(adapters) == SIZES["num_layers"] * 10 * 2  # 4 + 4 + 2 layers, each with A and B
    generator = torch.Generator().manual_seed(0)
    stage = StageConfig(steps=3, optim={"lr": 1e-2, "warmup_steps": 0})
    stage_trainer(dynamics, stage, "dynamics", low_precision=True).run(lambda _: dynamics.loss(clip, generator))
    changed = {name for name, p in dynamics.named_parameters() if not torch.equal(p.float(), before[name].float())}
    assert adapters <= changed
    assert {name for name in changed - adapters if name.startswith("network.transformer.")} == set()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fits_in_low_precision(dtype: str) -> None:
    dynamics, clip = make_dynamics(dtype=dtype), make_clip(2, 4)
    generator = torch.Generator().manual_seed(0)
    stage = StageConfig(steps=4, optim={"lr": 3e-3, "warmup_steps": 0})
    losses = []
    trainer = stage_trainer(dynamics, stage, "dynamics", low_precision=True)
    assert {p.dtype for p in dynamics.parameters()} == {torch.bfloat16}
    trainer.run(lambda _: dynamics.loss(clip, generator), lambda _, metrics: losses.append(metrics["loss"]))
    assert all(np.isfinite(losses))
    context, noise = begun(dynamics, clip, 1)
    frames = dynamics.imagine(context, clip.actions.at(slice(2, 4)), noise)
    assert frames.latents.dtype == frames.states.dtype == torch.float32 and frames.latents.isfinite().all()


def test_dynamics_is_chosen_by_kind() -> None:
    wan = {"kind": "wan", "transformer": {}, "memory": 3}
    config = validate(WorldModelConfig, {"dynamics": wan})
    assert isinstance(config.dynamics, WanConfig) and config.dynamics.memory == 3
    assert validate(WorldModelConfig, config.model_dump(mode="json")) == config
    for values in ({}, {"dynamics": {"memory": 3}}, {"dynamics": {"kind": "transformer"}}):
        assert isinstance(validate(WorldModelConfig, values).dynamics, TransformerConfig)
    with pytest.raises(ConfigError, match=r"dynamics\.kind: got 'wam', allowed: transformer, wan"):
        validate(WorldModelConfig, {"dynamics": {"kind": "wam"}})
    with pytest.raises(ConfigError, match=r"dynamics\.preset: unknown key .* Allowed: .*lora_rank"):
        validate(WorldModelConfig, {"dynamics": wan | {"preset": "tiny"}})
    with pytest.raises(ConfigError, match="dynamics: needs a 'kind', one of: transformer, wan; got 4"):
        validate(WorldModelConfig, {"dynamics": 4})
    with pytest.raises(ConfigError, match="either path"):
        validate(WorldModelConfig, {"dynamics": {"kind": "wan"}})


def test_wrong_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no transformer/config\.json"):
        make_dynamics(path=tmp_path)
    with pytest.raises(ValueError, match=r"unknown \['num_layer'\]"):
        make_dynamics(sizes={"num_layer": 2})
    with pytest.raises(ValueError, match="takes latents of 36 channels"):
        make_dynamics(sizes={"in_channels": 36})
    with pytest.raises(ValueError, match="span 2 frames"):
        make_dynamics(sizes={"patch_size": (2, 2, 2)})
    with pytest.raises(ValueError, match="cannot be cut into patches of 1 x 3"):
        make_dynamics(sizes={"patch_size": (1, 1, 3)})
    (tmp_path / "config.json").write_text('{"_class_name": "AutoencoderKLWan"}')
    with pytest.raises(ValueError, match="config of 'AutoencoderKLWan'; it must be of 'WanTransformer3DModel'"):
        make_dynamics(path=tmp_path)
