"""A policy of your own, named as `policy: {kind: "my_policy:BinsConfig"}`; a language model goes where `net` is."""

import torch
from torch import nn

from vla_rl.interfaces import Policy, PolicyOutput
from vla_rl.policies.base import PolicyConfig, read_policy_config, resolve_path
from vla_rl.policies.checkpoint_files import read_weights, write_folder, write_weights
from vla_rl.types import ActionChunk


class BinsConfig(PolicyConfig):
    kind: str = "my_policy:BinsConfig"

    def build(self, env_spec, device="cpu", seed=0):
        with torch.random.fork_rng([]):
            torch.manual_seed(seed)
            policy = Bins(env_spec.state_dim, env_spec.action_dim).to(device)
        return self.load(resolve_path(self.path), device) if self.path else policy

    @classmethod
    def load(cls, folder, device="cpu"):
        read_weights(folder, policy := Bins(*read_policy_config(folder)["sizes"]))
        return policy.to(device)


class Bins(nn.Module, Policy):  # Four actions a chunk from the state alone; a dimension is one of 21 bins in [-1, 1].
    def __init__(self, state_dim: int, action_dim: int):
        super().__init__()
        self.cameras, self.uses_state, self.chunk_size, self.action_dim = (), True, 4, action_dim
        self.net = nn.Sequential(nn.Linear(state_dim, 64), nn.Tanh(), nn.Linear(64, 4 * action_dim * 21))

    def bins(self, obs, temperature=1.0):
        logits = self.net(torch.as_tensor(obs.state)).unflatten(1, (4, self.action_dim, 21))
        return torch.distributions.Categorical(logits=logits / temperature)  # (B, H, A)

    @torch.no_grad()
    def act(self, obs, generator=None, temperature=1.0):
        bins = self.bins(obs, temperature or 1.0)
        tokens, log_prob = bins.probs.argmax(-1), None
        if temperature:
            tokens = torch.multinomial(bins.probs.flatten(0, 2), 1, generator=generator).view(tokens.shape)
            log_prob = bins.log_prob(tokens).numpy()
        return ActionChunk(tokens.float().numpy() / 10 - 1, tokens=tokens.numpy(), log_prob=log_prob)

    def evaluate(self, obs, chunk, temperature=1.0):
        bins = self.bins(obs, temperature)
        return PolicyOutput(bins.log_prob(torch.as_tensor(chunk.tokens)), bins.entropy())

    def bc_loss(self, obs, actions, valid=None, keyframe=None):
        log_prob = self.bins(obs).log_prob(torch.as_tensor(actions * 10 + 10).round().clamp(0, 20))
        return -(log_prob if valid is None else log_prob[torch.as_tensor(valid)]).mean(), {}

    def embed(self, obs):
        return self.net[:2](torch.as_tensor(obs.state)).detach()

    def save(self, folder):
        config = {"kind": "my_policy:BinsConfig", "sizes": [self.net[0].in_features, self.action_dim]}
        write_folder(folder, lambda partial: write_weights(partial, self, config, None))
