"""What every registered policy must do: shapes, dtypes, ranges, determinism, streams, saving."""

import numpy as np
import pytest
import torch
from representatives import REPRESENTATIVES, variants

from sim.dummy import DummyConfig
from vla_rl.config import KINDS, build_component
from vla_rl.data.config import DatasetConfig
from vla_rl.data.dataset import BCDataset, DataNeeds, open_dataset
from vla_rl.methods.offline.preferences import episode_batch, log_probs
from vla_rl.policies.base import PolicyConfig
from vla_rl.policies.fake_input import fake_env_spec, fake_observation, fake_statistics
from vla_rl.policies.load import load_policy
from vla_rl.types import ActionChunk, Observation
from vla_rl.workflows.gpu_bench import policy_matrix
from vla_rl.workflows.record_dataset import CollectConfig, collect_dataset

SPEC = fake_env_spec(image_size=32)
VARIANTS: dict[str, dict] = {name: {"image_size": 32} | values for name, values in policy_matrix.VARIANTS.items()}
CHAIN = {"openvla-image-chain": {"image_size": 32} | policy_matrix.ON_DEVICES["openvla-image-chain"]}


def build(name, seed=0, **options):
    if name.startswith("smolvla"):
        pytest.importorskip("num2words", reason="SmolVLA's processor needs it: install '.[flow]'")
    config = build_component("policy", (CHAIN | VARIANTS)[name] | options)
    assert isinstance(config, PolicyConfig)
    policy = config.build(SPEC, "cpu", seed)
    policy.set_norm_stats(fake_statistics(7), fake_statistics(8, gripper=False))
    return policy


@pytest.fixture(params=variants(VARIANTS), scope="module")
def policy(request):
    return build(request.param)


@pytest.fixture(params=variants(VARIANTS))
def name(request):
    return request.param


def assert_same(a, b):
    for field in ("actions", "tokens", "path", "log_prob", "value"):
        x, y = getattr(a, field), getattr(b, field)
        assert (x is None) == (y is None), field
        if x is not None:
            np.testing.assert_array_equal(x, y, err_msg=field)


def test_every_kind_has_a_variant():
    # tests/vla_rl/workflows/test_online.py, methods/offline/test_recap.py, methods/policy/test_prefix_conditioned.py.
    around_another = {"value_guided", "advantage_conditioned", "prefix_conditioned"}
    assert {values["kind"] for values in VARIANTS.values()} | around_another == set(KINDS["policy"])
    kinds = {name: (values["kind"], values.get("type"), values.get("decoder")) for name, values in VARIANTS.items()}
    assert {kinds[name] for name in REPRESENTATIVES} == set(kinds.values()), "one at least is asked by the fast tests"


@pytest.mark.parametrize("batch_size", [1, 3])
def test_shapes_dtypes_and_ranges(policy, batch_size):
    obs = fake_observation(SPEC, batch_size)
    shape = (batch_size, policy.chunk_size, policy.action_dim)
    for temperature in (0.0, 1.0):
        chunk = policy.act(obs, torch.Generator().manual_seed(0), temperature)
        assert chunk.actions.shape == shape and chunk.actions.dtype == np.float32
        assert np.isfinite(chunk.actions).all()
        if chunk.tokens is not None and chunk.tokens.ndim == 3:
            assert np.abs(chunk.actions).max() <= 1.0, "the statistics' quantiles are -1 and 1"
        assert (chunk.log_prob is None) == (temperature == 0)
        if chunk.tokens is not None:
            assert chunk.tokens.dtype == np.int64 and len(chunk.tokens) == batch_size and chunk.tokens.min() >= -1
            assert chunk.tokens.ndim == 2 or (chunk.tokens.shape == shape and chunk.tokens.min() >= 0)
    assert chunk.log_prob is not None and chunk.log_prob.shape == shape and chunk.log_prob.dtype == np.float32
    assert chunk.tokens is None or chunk.log_prob.max() <= 0, "probabilities are at most 1, densities are not"
    if chunk.value is not None:
        assert chunk.value.shape == (batch_size,) and chunk.value.dtype == np.float32
    output = policy.evaluate(obs, chunk)
    for x in (output.log_prob, output.entropy):
        assert tuple(x.shape) == shape and x.dtype == torch.float32
    assert output.log_prob.requires_grad
    assert output.entropy.requires_grad or chunk.path is not None, "Flow-SDE's noise has no parameters"
    assert (output.value is None) == (chunk.value is None)
    features = policy.embed(obs)
    assert features.ndim == 2 and len(features) == batch_size and not features.requires_grad


def test_declares_what_it_reads(policy):
    assert policy.action_dim == SPEC.action_dim and policy.chunk_size >= 1
    assert set(policy.cameras) <= set(SPEC.cameras) and isinstance(policy.uses_state, bool)
    assert isinstance(policy, torch.nn.Module)


def test_same_generator_same_chunk_and_the_stream_moves_on(policy):
    obs = fake_observation(SPEC, 3)
    generator = torch.Generator().manual_seed(7)
    first, second = policy.act(obs, generator), policy.act(obs, generator)
    again = torch.Generator().manual_seed(7)
    assert_same(policy.act(obs, again), first)
    assert_same(policy.act(obs, again), second)
    assert not np.array_equal(first.actions, second.actions)
    assert not np.array_equal(policy.act(obs, torch.Generator().manual_seed(8)).actions, first.actions)


def test_acting_with_a_generator_leaves_the_global_stream_alone(policy):
    obs = fake_observation(SPEC, 2)
    state = torch.get_rng_state()
    policy.act(obs, torch.Generator().manual_seed(0))
    policy.act(obs, temperature=0.0)
    assert torch.equal(torch.get_rng_state(), state)


def test_rows_of_a_batch_are_not_copies(policy):
    obs = fake_observation(SPEC, 1).select([0, 0])
    chunk = policy.act(obs, torch.Generator().manual_seed(0))
    assert not np.array_equal(chunk.actions[0], chunk.actions[1])


def test_greedy_is_deterministic(policy):
    obs = fake_observation(SPEC, 3)
    assert_same(policy.act(obs, temperature=0.0), policy.act(obs, temperature=0.0))


def test_evaluate_agrees_with_act(policy):
    obs = fake_observation(SPEC, 4)
    chunk = policy.act(obs, torch.Generator().manual_seed(0), 1.3)
    log_prob = policy.evaluate(obs, chunk, 1.3).log_prob.detach().numpy()
    np.testing.assert_allclose(log_prob, chunk.log_prob, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("name", [*variants(VARIANTS), *CHAIN])
@pytest.mark.parametrize("image_size", [32, 50])
def test_what_it_prepares_stands_for_the_observation_to_the_bit(name, image_size):
    policy = build(name)
    obs = fake_observation(fake_env_spec(image_size=image_size), 3)
    inputs = policy.prepare(obs)
    assert inputs is obs or inputs.is_prepared
    assert policy.prepare(inputs) is inputs
    assert inputs.instruction == obs.instruction and inputs.state is obs.state
    rows = [2, 0, 2]
    chunk = policy.act(obs.select(rows), torch.Generator().manual_seed(0))
    assert_same(policy.act(inputs.select(rows), torch.Generator().manual_seed(0)), chunk)
    raw, prepared = (policy.evaluate(seen.select(rows), chunk) for seen in (obs, inputs))
    for field in ("log_prob", "entropy", "value"):
        x, y = getattr(raw, field), getattr(prepared, field)
        assert x is y is None or torch.equal(x, y), field
    assert torch.equal(policy.embed(inputs), policy.embed(obs))
    actions = np.random.default_rng(0).uniform(-1, 1, (3, policy.chunk_size, policy.action_dim)).astype(np.float32)
    policy.eval()  # Without dropout, and with noise that hangs on the actions alone.
    assert torch.equal(policy.bc_loss(inputs, actions)[0], policy.bc_loss(obs, actions)[0])


def test_bc_loss_falls_along_its_gradient_and_reports_numbers(name):
    policy = build(name)
    obs = fake_observation(SPEC, 4)
    shape = (4, policy.chunk_size, policy.action_dim)
    actions = np.random.default_rng(0).uniform(-1, 1, shape).astype(np.float32)
    parameters = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)
    losses = []
    for _ in range(3):
        loss, metrics = policy.bc_loss(obs, actions, np.ones(shape[:2], dtype=bool))
        assert all(np.isfinite(float(v)) for v in metrics.values()), "numbers, or tensors that hold one"
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_save_and_load_give_the_same_policy(policy, tmp_path):
    obs = fake_observation(SPEC, 3)
    policy.save(tmp_path / "policy")
    again = load_policy(tmp_path / "policy")
    for temperature in (0.0, 1.0):
        streams = [torch.Generator().manual_seed(3) for _ in range(2)]
        assert_same(again.act(obs, streams[0], temperature), policy.act(obs, streams[1], temperature))
    assert again.chunk_size == policy.chunk_size and again.cameras == policy.cameras
    before, after = dict(policy.named_parameters()), dict(again.named_parameters())
    assert before.keys() == after.keys()
    for key, parameter in before.items():
        assert torch.equal(parameter, after[key]) and parameter.requires_grad == after[key].requires_grad, key


def test_fresh_weights_depend_on_the_seed_alone(name):
    torch.manual_seed(1)
    first = build(name, seed=5).state_dict()
    torch.manual_seed(2)
    same, other = build(name, seed=5).state_dict(), build(name, seed=6).state_dict()
    assert all(torch.equal(first[k], same[k]) for k in first)
    assert any(not torch.equal(first[k], other[k]) for k in first)


def own_episodes(policy, folder):
    """The policy's own decisions as it made them, and its four episodes as they are read back from disk."""
    drawn, act = [], policy.act

    def noted(obs, *args, **options):
        drawn.append((obs, act(obs, *args, **options)))
        return drawn[-1][1]

    policy.act = noted
    env = DummyConfig(num_envs=2, image_size=32, horizon=2 * policy.chunk_size + 1)
    config = {"source": "policy", "dataset": str(folder), "episodes_per_task": 2, "every_frame": False}
    collect_dataset(env, CollectConfig.model_validate(config), policy=policy)
    policy.act = act
    needs = DataNeeds(cameras=policy.cameras, action_dim=7, state_dim=8)
    data = BCDataset([open_dataset(DatasetConfig(path=str(folder)), needs)], policy.chunk_size)
    obs, chunks = Observation.concatenate([o for o, _ in drawn]), ActionChunk.concatenate([c for _, c in drawn])
    chunks.actions[:] = chunks.actions.clip(-1, 1)  # As the environment does them.
    return obs, chunks, [episode_batch(data, number) for number in range(4)]


@torch.no_grad()
def likelihood_of_actions(policy, obs, chunk):
    """Log-probability (B, H, A) of a chunk's actions: `evaluate`'s of each token that would have done the same, summed.

    An autoregressive policy reads the tokens so far, 0 in place of 1.
    """
    tokens, bins = np.where(chunk.tokens == 1, 0, chunk.tokens), policy.action_tokenizer.num_bins
    own = np.arange(tokens[0].size).reshape(tokens.shape[1:])
    one_by_one = policy.architecture.decoder == "autoregressive"
    places = [own == n for n in range(own.size)] if one_by_one else [own >= 0]
    total = np.full(tokens.shape, -np.inf)
    for token in range(bins):
        done = policy._to_env(policy.action_tokenizer.decode(np.full(tokens.shape, token)), policy._stats())
        for place in places:
            other = ActionChunk(chunk.actions, tokens=np.where(place, token, tokens))
            found = policy.evaluate(obs, other).log_prob.numpy()
            total = np.where(place & (done == chunk.actions), np.logaddexp(total, found), total)
    return total


@torch.no_grad()
def check_own_episodes(policy, folder):
    """Its episodes are as likely read back from disk as when it acted, action by action where each has its tokens."""
    obs, chunks, episodes = own_episodes(policy, folder)
    for batch in episodes:
        same = [(chunks.actions == a) | ~v[:, None] for a, v in zip(batch.actions, batch.valid, strict=True)]
        rows = np.array([int(np.flatnonzero(each.all((1, 2)))[0]) for each in same])
        obs_then, then, count = obs.select(rows), chunks.select(rows), int(batch.valid.sum()) * 7
        found = float(sum(log_probs(policy, batch, 64)))
        if chunks.tokens is not None and chunks.tokens.ndim == 3:
            expected = likelihood_of_actions(policy, obs_then, then)[batch.valid].sum()
        else:
            # What has no likelihood of actions alone has its cloning loss: denoising takes a path, an L1 loss has no
            # scale, and FAST writes a chunk in several ways. It must be that of the very actions.
            held = np.where(batch.valid[..., None], then.actions, batch.actions)
            expected = -float(policy.bc_loss(obs_then, held, batch.valid)[0]) * count
        assert found == pytest.approx(expected, abs=1e-4 * count)


def test_its_own_episodes_are_as_likely_read_back_from_disk_as_when_it_acted(name, tmp_path):
    # With four tokens for three actions, half of what is drawn comes back as another token.
    few = {"action_bins": 4} if VARIANTS[name]["kind"] == "openvla" else {}
    check_own_episodes(build(name, **few).eval(), tmp_path / "own")


def test_all_tokens_that_close_a_gripper_are_one_action(tmp_path):
    check_own_episodes(build("openvla-parallel", action_bins=6, gripper="open_is_one").eval(), tmp_path / "own")
