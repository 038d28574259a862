"""Rollouts by Ray's actors, here or on a cluster: `rollout: {kind: ray}`. Ray is imported in `cluster` alone."""
