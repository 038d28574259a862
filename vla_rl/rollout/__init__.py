"""Episodes of a policy in any `VecEnv`, and which task and initial state come next."""
