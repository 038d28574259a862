"""A device that is not there: a torch backend, `device=pretend`, with a GPU's rules and the host's numbers.

    from pretend_device import counting, pretending

    with pretending() as device, counting() as counts:
        policy = config.build(spec, device, 0)
        policy.act(obs)
    print(counts.totals, counts.places())

    python -m pretend_device train tabletop_grpo device=pretend     # Any vla-rl command; the counts at the end.

It finds what runs on the CPU and would fail or crawl on a GPU:

- tensors of the device and of the host in one operation, a generator of the other, `.numpy()` on a device tensor,
  and weights or buffers that stayed behind all raise, with the operation named;
- launches, reads for which the host waits, and copies between host and device are counted, with their places.

Values are computed by the host's kernels, so that results can be compared to the CPU's.

What it does not cover, so that a green test here says nothing about it: CUDA's own kernels (numbers, speed, attention
kernels, nondeterminism, `torch.compile`, CUDA graphs), streams and races between asynchronous copies and their readers,
memory (its size and fragments), several devices and NCCL, EGL, the 8-bit AdamW's kernels, and libraries that know
devices by a list of names (LeRobot's saving and loading). bf16 is autocast's by a short list of operations. The device
stands on a private part of torch (`_setup_privateuseone_for_python_backend`) that cannot be unloaded: the process
keeps it. It must be there before torch's first backward pass, so importing this package installs it.
"""

from pretend_device.backend import DeviceTensor, install, pretending
from pretend_device.counts import Counts, counting
from pretend_device.rules import NAME

__all__ = ["NAME", "Counts", "DeviceTensor", "counting", "install", "pretending"]

install()
