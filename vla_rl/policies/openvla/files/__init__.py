"""OpenVLA policies on disk: the published layout, ours, and made-up ones to try the path."""
