"""OpenVLA and OpenVLA-OFT: the network, its inputs, its published folders."""
