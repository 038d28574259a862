"""N environments as one `VecEnv`, in this process or in others."""
