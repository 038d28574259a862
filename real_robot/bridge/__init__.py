"""The bridge: topics to observations, actions to topics and goals, as a contract says."""
