"""Random generator with one stream a batch row, independent of the other rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


class RowGenerator(torch.Generator):
    """A generator for a batch: `by_row` draws each row from that row's own; what knows nothing of rows, from this one.

    Attributes:
        rows: the generator of each row of the batch.
    """

    rows: Sequence[torch.Generator] = ()

    def select(self, rows: Sequence[int]) -> RowGenerator:
        """The generator for a batch of these rows; one that comes several times draws one after the other."""
        chosen = RowGenerator()
        chosen.manual_seed(int(torch.randint(2**62, (), generator=self)))
        chosen.rows = [self.rows[row] for row in rows]
        return chosen


def by_row(
    draw: Callable[[tuple[int, ...], torch.Generator | None], torch.Tensor],
    shape: Sequence[int],
    generator: torch.Generator | None,
    dim: int = 0,
) -> torch.Tensor:
    """Draw a tensor of this shape, each row by its own generator where the generator has them.

    Args:
        draw: (shape, generator) -> the tensor.
        dim: dimension of `shape` that counts the rows.
    """
    if not isinstance(generator, RowGenerator):
        return draw(tuple(shape), generator)
    assert len(generator.rows) == shape[dim], f"{len(generator.rows)} generators for {shape[dim]} rows"
    one = tuple(1 if number == dim else size for number, size in enumerate(shape))
    return torch.cat([draw(one, row) for row in generator.rows], dim) if shape[dim] else draw(tuple(shape), None)
