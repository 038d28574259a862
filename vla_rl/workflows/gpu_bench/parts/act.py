"""Acting with 7 billion parameters: one chunk of actions for 1 to 64 environments, images on the host to actions."""

from __future__ import annotations

import torch

from vla_rl.common.cuda_graphs import compile_modules
from vla_rl.policies.openvla.policy import OpenVLAPolicy
from vla_rl.workflows.gpu_bench.large_policy import (
    AUTOREGRESSIVE,
    LORA,
    PARALLEL,
    observations,
    on_device,
    options,
)
from vla_rl.workflows.gpu_bench.record import Target
from vla_rl.workflows.gpu_bench.sheet import Attempt, LeftOutError, Sheet
from vla_rl.workflows.gpu_bench.timing import count_flops, median_seconds

H200 = "H200"
TARGETS = {
    ("parallel", "eager"): Target(160.0, device=H200),
    ("parallel", "CUDA graph of compiled layers"): Target(110.0, device=H200),
}
TARGET_BATCH = 16
SIZES = {"full": (16, 1, 4, 64), "tiny": (2,)}  # In the order of what matters, as time may run out.
DECODERS = {"parallel": PARALLEL, "autoregressive": AUTOREGRESSIVE}
GRAPH, COMPILED, BOTH = "CUDA graph", "compiled layers", "CUDA graph of compiled layers"
# In that order too. "merge_lora": adapters that are merged to act, and still there to learn, as in an RL rollout.
FORMS = [
    *((decoder, weights, "eager") for decoder in DECODERS for weights in ("LoRA", "merged")),
    *((decoder, weights, GRAPH) for decoder in DECODERS for weights in ("LoRA", "merge_lora", "merged")),
    *(("parallel", weights, how) for how in (COMPILED, BOTH) for weights in ("LoRA", "merged")),
    *(("autoregressive", weights, COMPILED) for weights in ("LoRA", "merged")),
]


class Acting:
    """The policy at hand, made when it is first asked for; there is room for one."""

    def __init__(self, sheet: Sheet) -> None:
        self.sheet = sheet
        self.flops: dict[tuple[str, str, int], float] = {}
        self._form: tuple[str, str, str] | None = None
        self._policy: OpenVLAPolicy | None = None

    def policy(self, form: tuple[str, str, str]) -> OpenVLAPolicy:
        """The policy with this decoder, these weights, computed so."""
        if self._policy is None or self._form != form:
            self._policy = None
            decoder, weights, how = form
            how_to_act = {"cuda_graphs": how in (GRAPH, BOTH), "merge_lora": weights == "merge_lora"}
            chosen = {**DECODERS[decoder], **LORA, **how_to_act}
            policy = on_device(options(self.sheet.is_full, **chosen), self.sheet.device)
            if weights == "merged":
                policy.merge_lora()
            if how in (COMPILED, BOTH):
                backend = "inductor" if self.sheet.is_full else "aot_eager"
                compile_modules(policy.network.repeated_layers(), backend)
            self._form, self._policy = form, policy
        return self._policy

    def measure(self, form: tuple[str, str, str], batch_size: int) -> None:
        """One figure."""
        sheet, (decoder, weights, how) = self.sheet, form
        if how in (COMPILED, BOTH) and sheet.device.type not in ("cuda", "cpu"):
            raise LeftOutError(f"torch.compile knows no device {sheet.device.type!r}")
        policy = self.policy(form)
        obs, generator = observations(policy, batch_size), torch.Generator().manual_seed(0)

        def act() -> None:
            chunk = policy.act(obs, generator, 1.0)
            assert chunk.log_prob is not None and (chunk.log_prob <= 0).all(), "no likelihood: NaN or above 1"

        key = (decoder, weights, batch_size)
        if how == "eager":
            self.flops[key] = count_flops(act)
        seconds = median_seconds(act, sheet.device, 5 if sheet.is_full else 1, 2 if sheet.is_full else 1)
        target = TARGETS.get((decoder, how)) if batch_size == TARGET_BATCH else None
        what = f"{decoder}, {weights}, {how}, B={batch_size}"
        sheet.add(what, 1000 * seconds, "ms", target, sheet.speed_note(self.flops.get(key), seconds, batch_size))


def measure(sheet: Sheet) -> None:
    """Wall time of `Policy.act`, images and actions on the host, as a rollout has it."""
    acting = Acting(sheet)
    attempts: list[Attempt] = []
    for form in FORMS:
        decoder, weights, how = form
        if not sheet.is_full and how in (COMPILED, BOTH) and (decoder, weights) != ("parallel", "LoRA"):
            continue  # One has the logic of all.
        attempts += [
            (f"{', '.join(form)}, B={size}", lambda form=form, size=size: acting.measure(form, size))
            for size in SIZES["full" if sheet.is_full else "tiny"]
        ]
    sheet.run(attempts)
