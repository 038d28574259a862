"""Wan as dynamics and autoencoder, on tiny random weights: causality, conditioning, learning, files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from vla_rl.config import ConfigError, validate
from world_model.config import WanConfig
from world_model.flow import mix
from world_model.types import Actions, Clip, Frames, NoiseStream
from world_model.wan import WanContext, WanDynamics
from world_model.wan_autoencoder import WanAutoencoder

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
    stream = NoiseStream([4])
    drawn = [(stream.normal(1, *SHAPE), stream.normal(STATE_DIM)) for _ in range(4)]  # 3 of the context, then the new
    noise = Frames(torch.stack([x for x, _ in drawn], 1), torch.stack([x for _, x in drawn], 1))
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
    groups = dynamics.parameter_groups()
    optimizer = torch.optim.AdamW([{"params": g, "lr": 5e-3} for g in groups.values()])
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


@torch.no_grad()
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_save_and_load(tmp_path: Path, dtype: str) -> None:
    dynamics, clip = make_dynamics(views=2, dtype=dtype), make_clip(2, 3, views=2)
    dynamics.save(tmp_path / "saved")
    dynamics.save(tmp_path / "saved")  # Replaces.
    (tmp_path / "saved").rename(tmp_path / "moved")
    loaded = WanDynamics.load(tmp_path / "moved")
    assert loaded.frame_steps == FRAME_STEPS and loaded.config.memory == dynamics.config.memory
    for mine, theirs in zip(predict(loaded, clip), predict(dynamics, clip), strict=True):
        assert torch.equal(mine, theirs)
    (tmp_path / "moved" / "added.safetensors").unlink()
    with pytest.raises(ValueError, match=r"no added\.safetensors"):
        WanDynamics.load(tmp_path / "moved")


def test_lora_trains_adapters_and_saves_only_them(tmp_path: Path) -> None:
    base, clip = publish(tmp_path / "base"), make_clip(2, 4)
    plain, dynamics = (
        make_dynamics(path=base, trained=False, lora_rank=rank, dtype="bfloat16", gradient_checkpointing=True)
        for rank in (0, 2)
    )
    for mine, theirs in zip(predict(dynamics, clip), predict(plain, clip), strict=True):
        torch.testing.assert_close(mine, theirs)
    groups = dynamics.parameter_groups()
    assert len(groups["transformer"]) == SIZES["num_layers"] * 10 * 2  # 4 + 4 + 2 layers, each with A and B
    frozen = {n: p.clone() for n, p in dynamics.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.AdamW([p for group in groups.values() for p in group], lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        optimizer.zero_grad()
        dynamics.loss(clip, generator)[0].backward()
        optimizer.step()
    assert all(torch.equal(p, frozen[n]) for n, p in dynamics.named_parameters() if n in frozen)
    dynamics.save(tmp_path / "saved")
    assert not (tmp_path / "saved" / "transformer").exists()
    for mine, theirs in zip(predict(WanDynamics.load(tmp_path / "saved"), clip), predict(dynamics, clip), strict=True):
        assert torch.equal(mine, theirs)
    base.rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"base: no transformer/config\.json"):
        WanDynamics.load(tmp_path / "saved")
    WanDynamics.load(tmp_path / "saved", base=tmp_path / "elsewhere")


def test_wrong_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="either path"):
        validate(WanConfig, {})
    with pytest.raises(ConfigError, match="adapters need pretrained"):
        validate(WanConfig, {"transformer": {}, "lora_rank": 4})
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
    save_vae(tmp_path / "transformer")
    with pytest.raises(ValueError, match="config of a AutoencoderKLWan"):
        make_dynamics(path=tmp_path)


def save_vae(folder: Path) -> None:
    """A tiny autoencoder of Wan 2.2's kind: 16 x in space, 4 x in time."""
    torch.manual_seed(0)
    diffusers.AutoencoderKLWan(
        base_dim=4,
        decoder_base_dim=8,
        z_dim=4,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=16,
        latents_mean=[0.1, -0.2, 0.3, 0.0],
        latents_std=[0.5, 1.0, 2.0, 4.0],
    ).save_pretrained(folder)


@pytest.fixture(scope="module")
def autoencoder(tmp_path_factory: pytest.TempPathFactory) -> WanAutoencoder:
    folder = tmp_path_factory.mktemp("pipeline")
    save_vae(folder / "vae")
    return WanAutoencoder.load(folder, (32, 48))


def random_images(length: int, rows: int = 1) -> torch.Tensor:
    g = torch.Generator().manual_seed(0)
    return torch.randint(256, (rows, length, 32, 48, 3), generator=g, dtype=torch.uint8)


def test_autoencoder_makes_one_frame_of_the_first_image_and_of_each_group(autoencoder: WanAutoencoder) -> None:
    images = random_images(9, rows=5)  # More than go through at a time.
    latents = autoencoder.encode(images)
    assert latents.shape == (5, 3, *autoencoder.latent_shape) and autoencoder.latent_shape == (4, 2, 3)
    assert latents.dtype == torch.float32
    decoded = autoencoder.decode(latents)
    assert decoded.shape == images.shape and decoded.dtype == torch.uint8
    torch.testing.assert_close(autoencoder.encode(images[4:])[0], latents[4], atol=1e-4, rtol=1e-4)
    # Scaled by the model's own mean and deviation of each channel.
    video = images[:1].permute(0, 4, 1, 2, 3) / 127.5 - 1
    raw = autoencoder.vae.encode(video).latent_dist.mode()[0, :, 1]  # channels of frame 1
    mean, std = torch.tensor([0.1, -0.2, 0.3, 0.0]), torch.tensor([0.5, 1.0, 2.0, 4.0])
    torch.testing.assert_close(latents[0, 1], (raw - mean[:, None, None]) / std[:, None, None], atol=1e-4, rtol=1e-4)
    shown = autoencoder.vae.decode(autoencoder.vae.encode(video).latent_dist.mode()).sample
    expected = ((shown + 1) * 127.5).permute(0, 2, 3, 4, 1)
    assert (decoded[:1].float() - expected).abs().max() <= 0.51


def test_autoencoder_is_causal_by_groups(autoencoder: WanAutoencoder) -> None:
    images = random_images(9)
    latents, changed = autoencoder.encode(images), images.clone()
    changed[:, 5] = 255 - changed[:, 5]
    after = autoencoder.encode(changed)
    assert torch.equal(after[:, :2], latents[:, :2]) and not torch.equal(after[:, 2], latents[:, 2])
    torch.testing.assert_close(autoencoder.encode(images[:, :5]), latents[:, :2])
    other = latents.clone()
    other[:, 2] = -other[:, 2]
    first, second = autoencoder.decode(latents), autoencoder.decode(other)
    assert torch.equal(first[:, :5], second[:, :5]) and not torch.equal(first[:, 5:], second[:, 5:])


def test_autoencoder_refuses_images_it_cannot_take(autoencoder: WanAutoencoder) -> None:
    with pytest.raises(ValueError, match="got 8 in a video; must be 1 \\+ a multiple of 4"):
        autoencoder.encode(random_images(8))
    with pytest.raises(ValueError, match="got 32 x 32 pixels"):
        autoencoder.encode(random_images(5)[:, :, :, :32])
    with pytest.raises(ValueError, match="multiples of 16"):
        WanAutoencoder(autoencoder.vae, (32, 40))


def test_imagined_frames_become_images(autoencoder: WanAutoencoder) -> None:
    """The way an environment goes: encode the first image, imagine, decode with what is remembered before it."""
    config = WanConfig.model_validate({"dtype": "float32", "transformer": SIZES | {"patch_size": (1, 1, 1)}})
    dynamics = WanDynamics(config, autoencoder.latent_shape, 1, STATE_DIM, ACTION_DIM, FRAME_STEPS)
    reference = Frames(autoencoder.encode(random_images(1))[:, :, None], torch.zeros(1, 1, STATE_DIM))
    noise, actions = NoiseStream([0]), make_clip(1, 3).actions.at(slice(1, 3))
    context = dynamics.begin(reference, noise)
    for _ in range(2):
        imagined = dynamics.imagine(context, actions, noise, num_steps=1)
        remembered = context.frames.latents[:, context.filled[0]]
        images = autoencoder.decode(torch.cat([remembered, imagined.latents], 1)[:, :, 0])[:, -8:]
        assert images.shape == (1, 8, 32, 48, 3)
        context = dynamics.extend(context, imagined, actions, noise)
    assert context.filled.sum() == 5
