"""Recorded episodes as frames, latents and clips; styles; where imagined episodes begin."""
