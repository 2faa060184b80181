"""Kinds of layers."""

from dataclasses import dataclass
from typing import Literal

Mixer = Literal["attention"]
Mlp = Literal["dense"]


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What a layer consists of.

    Attributes:
        mixer: the part that mixes tokens; None for a layer without one.
        mlp: the part that works on each token; None for a layer without one.
    """

    mixer: Mixer | None = "attention"
    mlp: Mlp | None = "dense"


DECODER_LAYER = LayerKind()
"""A layer with attention and a dense MLP."""
