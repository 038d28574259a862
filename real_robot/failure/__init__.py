"""Failure detection: scores on the policy's embeddings, against a band with a known false-alarm rate."""
