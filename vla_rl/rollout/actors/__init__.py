"""Rollouts by Ray's actors, on one machine or many: the section `rollout: {kind: ray}`. Only here is Ray imported."""
