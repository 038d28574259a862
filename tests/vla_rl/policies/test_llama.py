"""The Llama: the library's numbers and names; masks, kernels, caches, reading some positions only."""

import pytest
import torch
import transformers

from vla_rl.policies.openvla.network.llama import LlamaForCausalLM, RMSNorm, rotate
from vla_rl.policies.openvla.network.network import attention_mask, token_positions
from vla_rl.policies.openvla.options import LlamaSpec

SPEC = LlamaSpec(
    hidden_size=64, intermediate_size=112, num_layers=3, num_heads=4, num_kv_heads=2, vocab_size=50,
    padded_vocab_size=64,
)  # fmt: skip


@pytest.fixture
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(SPEC)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.2)
    return model


def embeddings(rows: int = 3, length: int = 11) -> torch.Tensor:
    return torch.randn(rows, length, 64, generator=torch.Generator().manual_seed(1))


def run(model, x, valid=None, causal=True, **kwargs):
    valid = torch.ones(x.shape[:2], dtype=torch.bool) if valid is None else valid
    length = x.shape[1]
    mask, positions = attention_mask(valid, length, causal, x.device), token_positions(valid, length, x.device)
    return model.model(x, positions, mask, **kwargs)


def library_model(model: LlamaForCausalLM) -> transformers.LlamaForCausalLM:
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=112, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, rms_norm_eps=SPEC.rms_norm_eps, attn_implementation="eager",
    )  # fmt: skip
    library = transformers.LlamaForCausalLM(config).eval()
    library.load_state_dict(model.state_dict())
    return library


def test_names_and_numbers_are_the_librarys(model):
    library = library_model(model)
    assert list(model.state_dict()) == list(library.state_dict())
    x = embeddings().requires_grad_()
    ours = run(model, x)
    theirs = library.model(inputs_embeds=x).last_hidden_state
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)
    ours.square().sum().backward()
    assert x.grad is not None
    grad_ours, x.grad = x.grad, None
    theirs.square().sum().backward()
    torch.testing.assert_close(grad_ours, x.grad, atol=2e-4, rtol=1e-4)
    for (name, a), (_, b) in zip(model.named_parameters(), library.named_parameters(), strict=True):
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, atol=5e-4, rtol=5e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("causal", [True, False])
def test_eager_and_sdpa_agree(model, causal):
    valid = torch.ones(3, 11, dtype=torch.bool)
    valid[1, 4:6] = False
    outputs = []
    for kernel in ("eager", "sdpa"):
        model.model.kernel = kernel
        outputs.append(run(model, embeddings(), valid, causal)[valid])
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_a_later_position_matters_in_both_directions_only_without_causality(model, kernel):
    model.model.kernel = kernel
    x = embeddings()
    changed = x.clone()
    changed[:, -1] += 1.0
    difference = {c: (run(model, x, causal=c) - run(model, changed, causal=c)).abs()[:, :-1] for c in (True, False)}
    assert difference[True].max() == 0
    assert difference[False].amax(-1).min() > 1e-4, "every earlier position must notice"


@pytest.mark.parametrize("causal", [True, False])
def test_padding_changes_nothing(model, causal):
    x = embeddings(1, 8)
    padded = torch.cat((x[:, :3], 100 * torch.ones(1, 2, 64), x[:, 3:]), 1)
    valid = torch.tensor([[True] * 3 + [False] * 2 + [True] * 5])
    torch.testing.assert_close(run(model, padded, valid, causal)[valid][None], run(model, x, None, causal))
    assert token_positions(valid, 10, x.device)[0, 5:].tolist() == [3, 4, 5, 6, 7]


def test_reading_some_positions_equals_a_slice_of_all(model):
    x = embeddings()
    for causal in (True, False):
        everything = run(model, x, causal=causal)
        torch.testing.assert_close(run(model, x, causal=causal, read=slice(4, 9)), everything[:, 4:9])


def test_cached_steps_equal_one_pass(model):
    x = embeddings()
    expected = run(model, x)
    mask, positions = attention_mask(None, 8, True, x.device), token_positions(None, 8, x.device)
    caches = model.model.make_caches(len(x), 11, x)

    def until(end):
        return [(keys[:, :, :end], values[:, :, :end]) for keys, values in caches]

    rows = [model.model(x[:, :8], positions, mask, caches=until(8))]
    for i in range(8, 11):
        rows.append(model.model(x[:, i : i + 1], torch.tensor([[i]]), None, caches=until(i + 1)))
    torch.testing.assert_close(torch.cat(rows, 1), expected, atol=1e-5, rtol=1e-5)


def test_gradient_checkpointing_gives_the_same_gradients(model):
    grads = []
    for on in (False, True):
        model.model.gradient_checkpointing = on
        model.zero_grad()
        run(model, embeddings()).square().sum().backward()
        grads.append(model.model.layers[0].mlp.up_proj.weight.grad.clone())
    torch.testing.assert_close(*grads)


def test_hand_written_gradients():
    torch.manual_seed(0)
    x = torch.randn(2, 3, 5, 8, dtype=torch.float64, requires_grad=True)
    angle = torch.randn(1, 1, 5, 4, dtype=torch.float64)
    cos, sin = torch.cat((angle.cos(),) * 2, -1), torch.cat((-angle.sin(), angle.sin()), -1)
    assert torch.autograd.gradcheck(lambda x: rotate(x, cos, sin), (x,))
    norm = RMSNorm(8, 1e-6).double()
    norm.weight.data.normal_()
    arguments = (x, norm.weight)
    assert torch.autograd.gradcheck(lambda x, w: torch.func.functional_call(norm, {"weight": w}, (x,)), arguments)


def test_compiled_gradients_are_the_eager_ones(model):
    """Every trained weight, q and k behind the rotary embedding among them, whose gradients became exactly 0."""

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        run(model, embeddings()).square().sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    eager = gradients()
    torch.compiler.reset()
    model.model.compile(backend="aot_eager")
    compiled = gradients()
    assert eager.keys() == compiled.keys() and any("q_proj" in name for name in eager)
    for name, gradient in eager.items():
        assert gradient.abs().sum() > 0, name
        torch.testing.assert_close(compiled[name], gradient, atol=1e-4, rtol=1e-3, msg=name)
