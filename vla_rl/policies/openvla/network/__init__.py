"""The OpenVLA network: vision towers, Llama, action heads."""
