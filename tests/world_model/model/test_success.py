"""The success head and the clip classifier: they learn where and which, obey the instruction, keep their contract."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from vla_rl.common.instruction_embedding import MAX_WORDS, NUM_ROWS, WordEmbedding, split_words
from world_model.config import SuccessConfig
from world_model.interfaces import SuccessHead
from world_model.model.success import ClipSuccessClassifier, LatentSuccessHead, ValueHead, _shifted, timed
from world_model.types import Frames

CONFIG = SuccessConfig(width=32, depth=1, num_frames=2)
SHAPE, STATE_DIM = (4, 8, 8), 3
COLORS = ("red", "blue")
HEADS = ("head", "classifier")


def make(kind: str, num_views: int = 1, seed: int = 0) -> LatentSuccessHead | ClipSuccessClassifier:
    torch.manual_seed(seed)
    if kind == "head":
        return LatentSuccessHead(CONFIG, SHAPE, num_views, STATE_DIM)
    return ClipSuccessClassifier(CONFIG, SHAPE, num_views)


def put(image: torch.Tensor, channel: int, place: torch.Tensor) -> None:
    """A bright pixel in one channel of each image (N, C, 8, 8), at `place` (N, 2)."""
    image[torch.arange(len(image)), channel, place[:, 0], place[:, 1]] = 4.0


def toy(
    num: int, num_frames: int, generator: torch.Generator, num_views: int = 1
) -> tuple[Frames, Frames, list[str], torch.Tensor]:
    """A zone (2 x 2, channel 2), a red and a blue block (channels 0 and 1). Success: the named one is in the zone.

    Where it is not, it lies one or two pixels beside it. The other block is in the zone half of the time as well.
    """
    corner = torch.randint(2, 5, (num, 2), generator=generator)
    latents = torch.zeros(num, 1 + num_frames, num_views, *SHAPE)
    for i in range(2):
        for j in range(2):
            for frame in range(1 + num_frames):
                put(latents[:, frame, 0], 2, corner + torch.tensor([i, j]))
    wanted = torch.randint(2, (num,), generator=generator)
    inside = torch.rand(num, 2, generator=generator) < 0.5
    for color in range(2):
        within = corner + torch.randint(2, (num, 2), generator=generator)
        beside = torch.where(torch.rand(num, generator=generator) < 0.5, -1, 2)
        outside = torch.stack([corner[:, 0] + beside, within[:, 1]], 1)
        put(latents[:, 0, 0], color, torch.randint(8, (num, 2), generator=generator))
        end = torch.where(inside[:, color, None], within, outside)
        for frame in range(1, 1 + num_frames):
            put(latents[:, frame, 0], color, end)
    frames = Frames(latents[:, 1:], torch.randn(num, num_frames, STATE_DIM, generator=generator))
    reference = Frames(latents[:, :1], torch.randn(num, 1, STATE_DIM, generator=generator))
    instruction = [f"put the {COLORS[i]} block into the zone" for i in wanted.tolist()]
    return frames, reference, instruction, inside[torch.arange(num), wanted]


@pytest.mark.parametrize("kind", HEADS)
def test_it_learns_where_and_which(kind: str) -> None:
    network = make(kind)
    optimizer = torch.optim.AdamW(network.parameters(), lr=8e-3, weight_decay=0.01)
    g = torch.Generator().manual_seed(0)
    for step in range(100):
        torch.manual_seed(step)
        loss, metrics = network.loss(*toy(64, network.num_frames, g))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    frames, reference, instruction, success = toy(400, network.num_frames, torch.Generator().manual_seed(1))
    said = network.score(frames, reference, instruction) > 0
    assert float((said == success).float().mean()) > 0.93  # Blind to the color: .75; blind to the place: .5.
    assert metrics["accuracy"] > 0.8

    other = [
        "put the blue block into the zone" if "red" in text else "put the red block into the zone"
        for text in instruction
    ]
    changed = (network.score(frames, reference, other) > 0) != said
    assert 0.3 < float(changed.float().mean()) < 0.7  # The other block's place differs half of the time.


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("num_views", [1, 2])
def test_a_batch_scores_as_one_by_one(kind: str, num_views: int) -> None:
    network = make(kind, num_views)
    frames, reference, _, _ = toy(3, network.num_frames, torch.Generator().manual_seed(0), num_views)
    instruction = ["stack", "put the red block on the blue block and push it", ""]
    together = network.score(frames, reference, instruction)
    assert together.shape == (3,) and together.dtype == torch.float32
    alone = [network.score(frames.select([i]), reference.select([i]), [instruction[i]]) for i in range(3)]
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", HEADS)
def test_scores_have_no_gradient_and_no_randomness_in_any_mode(kind: str) -> None:
    network: SuccessHead = make(kind)
    frames, reference, instruction, _ = toy(4, network.num_frames, torch.Generator().manual_seed(0))
    before = torch.random.get_rng_state()
    scores = [make(kind).train(mode).score(frames, reference, instruction) for mode in (True, False)]
    torch.random.set_rng_state(before)
    score = network.score(frames, reference, instruction)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not score.requires_grad
    assert torch.equal(scores[0], scores[1]) and torch.equal(scores[0], score)


@pytest.mark.parametrize("kind", HEADS)
def test_the_loss_is_augmented_in_any_mode_and_repeats_under_a_seed(kind: str) -> None:
    network = make(kind)
    batch = toy(8, network.num_frames, torch.Generator().manual_seed(0))
    clean = F.binary_cross_entropy_with_logits(network.score(*batch[:3]), batch[3].float())
    losses = []
    for mode, seed in ((True, 1), (False, 1), (False, 2)):
        torch.manual_seed(seed)
        losses.append(network.train(mode).loss(*batch)[0])
    assert losses[0].requires_grad
    assert torch.equal(losses[0], losses[1])
    assert len({clean.item(), losses[1].item(), losses[2].item()}) == 3


def test_the_classifier_sees_no_state_and_the_head_does() -> None:
    for kind, sees in (("head", True), ("classifier", False)):
        network = make(kind)
        frames, reference, instruction, _ = toy(4, network.num_frames, torch.Generator().manual_seed(0))
        moved = Frames(frames.latents, frames.states + 1)
        same = torch.equal(network.score(frames, reference, instruction), network.score(moved, reference, instruction))
        assert same is not sees


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("part", ["reference", "earliest", "newest"])
def test_every_frame_is_seen(kind: str, part: str) -> None:
    network = make(kind)
    frames, reference, instruction, _ = toy(4, network.num_frames, torch.Generator().manual_seed(0))
    changed = {"reference": reference.latents[:, 0], "earliest": frames.latents[:, 0], "newest": frames.latents[:, -1]}
    before = network.score(frames, reference, instruction)
    changed[part][:, 0, 3, 5, 5] += 3.0
    assert not torch.allclose(before, network.score(frames, reference, instruction))


@pytest.mark.parametrize("kind", HEADS)
def test_weights_round_trip(kind: str) -> None:
    network, other = make(kind), make(kind, seed=1)
    batch = toy(4, network.num_frames, torch.Generator().manual_seed(0))[:3]
    assert not torch.allclose(network.score(*batch), other.score(*batch))
    other.load_state_dict(network.state_dict())
    assert torch.equal(network.score(*batch), other.score(*batch))


def test_both_are_small() -> None:
    config = SuccessConfig()
    for network in (LatentSuccessHead(config, (8, 16, 16), 1, 8), ClipSuccessClassifier(config, (8, 16, 16), 1)):
        assert sum(p.numel() for p in network.parameters()) < 600_000


def test_odd_latents_and_a_wrong_width() -> None:
    for network in (
        LatentSuccessHead(CONFIG, (4, 7, 9), 1, STATE_DIM),
        ClipSuccessClassifier(CONFIG, (4, 7, 9), 1),
    ):
        frames = Frames(torch.randn(2, network.num_frames, 1, 4, 7, 9), torch.randn(2, network.num_frames, STATE_DIM))
        assert network.score(frames, frames.at(slice(0, 1)), ["push", "pull"]).shape == (2,)
    with pytest.raises(ValueError, match=r"success\.width: got 48, must be a multiple of 32"):
        LatentSuccessHead(SuccessConfig(width=48), SHAPE, 1, STATE_DIM)
    with pytest.raises(ValueError, match=r"success\.width"):
        ClipSuccessClassifier(SuccessConfig(width=48), SHAPE, 1)


def test_a_shift_moves_the_whole_clip_by_at_most_one_pixel() -> None:
    torch.manual_seed(0)
    clips = torch.zeros(200, 2, 1, 1, 5, 5)
    clips[..., 2, 2] = 1.0
    moved = _shifted(clips)
    places = {tuple(clip[0, 0, 0].nonzero()[0].tolist()) for clip in moved}
    assert places == {(i, j) for i in (1, 2, 3) for j in (1, 2, 3)}
    assert torch.equal(moved[:, 0], moved[:, 1])  # every frame alike
    edge = torch.ones(50, 1, 1, 1, 5, 5)
    assert torch.equal(_shifted(edge), edge)  # the border is repeated


def test_words() -> None:
    assert split_words("Put the RED block, on plate 2!") == ["put", "the", "red", "block", "on", "plate", "2"]
    assert split_words("") == split_words("?!") == [""]
    assert len(split_words("word " * 100)) == MAX_WORDS
    assert split_words("poser l'objet près") == ["poser", "l", "objet", "près"]


def test_words_have_vectors_of_their_own() -> None:
    words = WordEmbedding(16)
    colors = ["red", "green", "blue", "yellow", "purple", "orange", "black", "white", "pink", "brown", "gray", "cyan"]
    rows = {tuple(sorted(words._rows(color)[0])) for color in colors}
    assert len(rows) == len(colors)
    vectors, is_word = words(["the red block", "stack"])
    assert vectors.shape == (2, 3, 16)
    assert is_word.tolist() == [[True, True, True], [True, False, False]]
    assert not vectors[1, 1:].any()
    assert torch.equal(vectors[0, 1], words(["RED"])[0][0, 0])
    first, second = words._rows("red")[0]
    assert all(0 <= row < NUM_ROWS for row in (first, second))
    assert torch.equal(vectors[0, 1], words.embed_rows.weight[first] + words.embed_rows.weight[second])


def test_pairs_of_words_tell_the_order() -> None:
    plain, pairs = WordEmbedding(16), WordEmbedding(16, pairs=True)
    texts = ["red on blue", "blue on red"]
    assert torch.allclose(*plain(texts)[0].sum(1))
    assert not torch.allclose(*pairs(texts)[0].sum(1))
    assert pairs(texts)[1].sum(1).tolist() == [5, 5]


def test_a_value_head_that_starts_as_the_success_head_says_the_same_whatever_time_is_left() -> None:
    head, value = make("head", num_views=2), ValueHead(CONFIG, SHAPE, 2, STATE_DIM)
    assert isinstance(head, LatentSuccessHead)
    frames, reference, instruction, _ = toy(5, 2, torch.Generator().manual_seed(0), num_views=2)
    value.start_from(head)
    for left in (0.0, 1.0):
        share = torch.full((5,), left)
        assert timed(frames, share).states[:, :, -1].unique().tolist() == [4 * left - 2]
        found = value.score(timed(frames, share), timed(reference, share), instruction)
        torch.testing.assert_close(found, head.score(frames, reference, instruction))
