"""Post-train vision-language-action policies with reinforcement learning."""

__version__ = "0.1.0"
