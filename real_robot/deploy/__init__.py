"""`vla-rl deploy`: robot, policy client, supervisor, operator and recorder put together from one contract."""
