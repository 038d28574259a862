"""The networks: images to latents, latents and actions to the next latents, latents to success."""
