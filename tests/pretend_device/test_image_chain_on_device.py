"""The published checkpoints' image chain: the host compresses, the device resizes and crops, to the same pixels."""

import numpy as np
import torch

from pretend_device import counting, pretending
from vla_rl.policies.openvla.inputs import apply_chain
from vla_rl.policies.openvla.options import OPENVLA_CHAIN


def test_the_device_gives_the_hosts_pixels_for_one_copy_each_way():
    images = np.random.default_rng(0).integers(0, 256, (3, 96, 80, 3), dtype=np.uint8)
    on_host = apply_chain(images, OPENVLA_CHAIN, 64)
    with pretending() as name:
        device = torch.device(name)
        apply_chain(images, OPENVLA_CHAIN, 64, device)  # Its matrices are copied once.
        with counting() as counts:
            on_device = apply_chain(images, OPENVLA_CHAIN, 64, device)
    np.testing.assert_array_equal(on_device, on_host)
    assert (sum(counts.uploads.values()), sum(counts.downloads.values())) == (1, 1) and counts.kernels
