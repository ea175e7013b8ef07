"""The integers of a layer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counters:
    """The integers of a layer: they travel with its tensors when it is saved."""

    seen: int = 0
    """Tokens seen, padding included."""
    fresh: int = 0
    """Rows added since the last compression."""
    round: int = 0
    """Compressions so far."""
    uncounted: int = 0
    """Newest queries that neither `mass` nor the remembered queries include yet."""
    prompt_open: bool = True
    """Whether the next multi-token forward still belongs to the prompt."""
    padded: bool = False
    """Whether some stored row or recent query may be padding."""
    forwards: int = 0
    """Forwards so far."""
    uncropped: int = 0
    """Forwards since the last `crop`."""
