"""`vla-rl merge`: adapters into the weights they adapt, checked by the outputs before and after.

A wrong merge (another base, another scaling, rounding that swallows small changes) is found out on
the robot otherwise. So the checkpoint that was written is read again, and must give the outputs
that base and adapters gave, up to what its storage dtype can hold.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor

from vla_rl.policies import lora
from vla_rl.policies.base import CONFIG_FILE, OWN_FILE
from vla_rl.policies.openvla.files.layout import is_published, read_published
from vla_rl.policies.openvla.policy import OpenVLAPolicy

# Share of the adapters' effect on the outputs that may be lost to rounding.
LARGEST_LOSS = 0.2
MERGED_FILE = "merged_adapters.json"  # In a checkpoint: digests of the adapters that its weights hold.
_FP32 = {"precision": "fp32", "weights": "fp32"}


@dataclass(frozen=True)
class MergeReport:
    """What a merge did to the outputs (action logits, or the L1 head's actions) on a batch.

    Attributes:
        folder: the merged checkpoint.
        effect: root mean square of what the adapters change.
        error: root mean square of merged minus unmerged.
        agreement: share of greedy action tokens that stay; None for a continuous head.
    """

    folder: Path
    effect: float
    error: float
    agreement: float | None

    @property
    def loss(self) -> float:
        """error / effect; 0 where the adapters change nothing and nothing changed."""
        return self.error / self.effect if self.effect > 0 else float(self.error > 0)

    def text(self) -> str:
        """For people."""
        tokens = "" if self.agreement is None else f", {100 * self.agreement:.1f} % of greedy tokens the same"
        return (
            f"merged: {self.folder}\noutputs before and after: the adapters change them by {self.effect:.3g} (rms), "
            f"the merge by {self.error:.3g} ({100 * self.loss:.1f} % of that){tokens}"
        )


def merge(
    adapters: Path, output: Path, base: Path | None = None, device: str = "cpu", dtype: torch.dtype | None = None
) -> MergeReport:
    """Merge a folder of adapters and write the whole checkpoint, in the base's layout.

    Computes in float32: needs 4 bytes for each parameter.

    Args:
        adapters: a policy with adapters saved here, or any PEFT LoRA folder of an OpenVLA model.
        base: the checkpoint that the adapters belong to; None where the folder names it.
        dtype: store the weights so; None: as the base does.

    Raises:
        ValueError: something missing or damaged, the base holds these adapters already, or the merged outputs differ by
            more than rounding may; nothing is left at `output`.
    """
    adapters, output = Path(adapters), Path(output)
    if output.exists():
        raise ValueError(f"{output}: exists already; choose another folder for the merged checkpoint")
    if not adapters.is_dir():
        raise ValueError(f"{adapters}: no such folder; give the folder of LoRA adapters")
    policy, chosen = _with_adapters(adapters, base, device)
    held = _held(adapters, policy.published.folder) if policy.published else []
    gives_tokens = policy.network.action_head is None
    before = _outputs(policy)
    with _without_adapters(policy):
        plain = _outputs(policy)
    policy.merge_lora()
    policy.save(output, dtype)
    del policy
    if held:
        (output / MERGED_FILE).write_text(json.dumps(held))
    if base is not None:  # A download stays one: what only the check needed is not the user's choice.
        (output / OWN_FILE).unlink(missing_ok=True)
    after = _outputs(OpenVLAPolicy.load(output, device, chosen=chosen))
    agreement = float((before.argmax(-1) == after.argmax(-1)).float().mean()) if gives_tokens else None
    report = MergeReport(output, _rms(before - plain), _rms(after - before), agreement)
    if report.loss > LARGEST_LOSS:
        shutil.rmtree(output)
        raise ValueError(
            f"{adapters}: the merged checkpoint does not give the outputs of base and adapters, so it was removed. "
            f"{report.text().partition(chr(10))[2]}. If the adapters change little, bfloat16 cannot hold it: merge "
            "again with --dtype float32."
        )
    return report


def _held(adapters: Path, base: Path) -> list[str]:
    """Digests of all adapters that the merged checkpoint will hold; ValueError where the base holds these already."""
    digest = hashlib.blake2b((adapters / lora.ADAPTER_FILE).read_bytes(), digest_size=16).hexdigest()
    known = json.loads((base / MERGED_FILE).read_text()) if (base / MERGED_FILE).is_file() else []
    if digest in known or base.resolve() in adapters.resolve().parents:  # OpenVLA-OFT leaves them where it merged them.
        raise ValueError(
            f"{adapters}: {base} holds these adapters already, and they would count twice. Use it as it is, or give "
            "the checkpoint that they were trained on."
        )
    return [*known, digest]


def _with_adapters(adapters: Path, base: Path | None, device: str) -> tuple[OpenVLAPolicy, dict[str, str]]:
    """The policy with its adapters, and the options with which what is written is to be read."""
    if base is None:
        if not ((adapters / OWN_FILE).is_file() or (adapters / CONFIG_FILE).is_file()):
            raise ValueError(f"{adapters}: does not name its base checkpoint; give it with --base FOLDER")
        policy = OpenVLAPolicy.load(adapters, device, chosen=_FP32)
        if policy.config.lora is None:
            raise ValueError(f"{adapters}: has no adapters, so there is nothing to merge")
        return policy, _FP32
    chosen = _FP32 | _any_statistics(base)
    policy = OpenVLAPolicy.load(base, device, chosen=chosen)
    options = lora.read_adapters(policy.network, adapters)
    policy.config = policy.config.model_copy(update={"lora": options})
    return policy.finish(device), chosen


def _any_statistics(base: Path) -> dict[str, str]:
    """A merge is of weights alone: where a checkpoint has many datasets' statistics, none needs to be chosen."""
    if (base / OWN_FILE).is_file() or not is_published(base):
        return {}
    names = sorted(read_published(base).statistics)
    return {"norm_key": names[0] if names else "from_data"}


@torch.no_grad()
def _outputs(policy: OpenVLAPolicy, batch_size: int = 4, length: int = 24) -> Tensor:
    """Action logits or continuous actions on made-up inputs, float32 on the CPU; the same for every call."""
    network, arch = policy.network, policy.architecture
    generator = torch.Generator().manual_seed(0)
    shape = (batch_size, len(policy.cameras), arch.image_size, arch.image_size, 3)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    words = torch.randint(3, arch.llm.vocab_size - arch.action_bins, (batch_size, length), generator=generator)
    state = torch.rand(batch_size, arch.state_dim or 1, generator=generator) * 2 - 1
    tokens = torch.randint(0, arch.action_bins, (batch_size, arch.num_action_tokens), generator=generator)
    device = policy.device
    prefix = network.prefix(images.to(device), state.to(device), words.to(device))
    hidden = network.hidden(prefix, tokens.to(device))
    return (network.logits(hidden) if network.action_head is None else network.action_head(hidden)).cpu()


@contextmanager
def _without_adapters(policy: OpenVLAPolicy) -> Iterator[None]:
    layers = [module for module in policy.network.modules() if isinstance(module, LoraLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())
