"""Where the rows of the examples are in a dim that consists of blocks.

After merging the dims (time, batch), each of `time` blocks has a row per example. A dim of examples
alone is one block. Rows that are all equal fit any number of blocks.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Literal

from autopar.primitives.factors import OpFactors


@dataclass(frozen=True, slots=True)
class ExamplesFactor:
    """The factor of an equation that runs over the examples.

    Attributes:
        number: the number of the factor.
        blocks: the number of blocks within the factor; None if all rows are equal.
        regular: whether the equation has the same factors for other sizes of the batch, and only
            this one grows.
        sizes: the trip counts of all factors.
    """

    number: int
    blocks: int | None
    regular: bool
    sizes: tuple[int, ...]

    def dim_of(self, dims: Iterable[tuple[int, ...]]) -> tuple[int, int | None] | None:
        """Return the dim of an array that has the examples, and the number of its blocks.

        Args:
            dims: the factors of each dim.

        Returns:
            None if no dim has the examples in blocks.
        """
        for dim, factors in enumerate(dims):
            if self.number not in factors:
                continue
            major = factors[: factors.index(self.number)]
            if major and not self.regular:
                return None
            if self.blocks is None:
                return dim, None
            return dim, self.blocks * prod(self.sizes[factor] for factor in major)
        return None


def examples_factor(
    factors: OpFactors, larger: OpFactors, dim: tuple[int, ...], blocks: int | None
) -> ExamplesFactor | None:
    """Return the factor of the examples; None if there is none.

    Args:
        factors: the factors of an equation.
        larger: its factors for a larger batch.
        dim: the factors of the dim of an operand that has a row per example.
        blocks: the number of blocks in that dim; None if all rows are equal.
    """
    if not dim:
        return None
    alike = (factors.operands, factors.results) == (larger.operands, larger.results)
    sizes = zip(factors.sizes, larger.sizes, strict=True) if alike else ()
    grown = [number for number, (size, other) in enumerate(sizes) if size != other]
    regular = len(grown) == 1 and grown[0] in dim
    if blocks == 1 or not regular:
        if blocks not in (1, None):
            return None
        return ExamplesFactor(dim[0], blocks, regular and grown[0] == dim[0], factors.sizes)
    number = grown[0]
    if blocks is None:
        return ExamplesFactor(number, None, regular, factors.sizes)
    major = prod(factors.sizes[each] for each in dim[: dim.index(number)])
    inner, rest = divmod(blocks, major)
    if rest or factors.sizes[number] % inner or larger.sizes[number] % inner:
        return None
    return ExamplesFactor(number, inner, regular, factors.sizes)


def common_blocks(several: Iterable[int | None]) -> int | Literal["none"] | None:
    """Return the number of blocks that fits several dims; "none" if they differ."""
    numbers = set(several) - {None}
    if len(numbers) > 1:
        return "none"
    return numbers.pop() if numbers else None
