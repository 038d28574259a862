"""Camera calibration (intrinsics, hand-eye) and the workspace box."""
