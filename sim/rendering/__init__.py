"""Offscreen rendering: the GL context, the devices, and segmentation."""
