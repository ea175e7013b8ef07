"""The last queries of a layer, for methods that score with them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor


class RecentQueries:
    """A buffer of the newest queries, written in place and compacted when it is full.

    Holds the last `window + spare` queries at least; those beyond `window` are there so that the newest ones may be
    dropped again. `spare` may be changed at any time; `trim` gives back what a larger one held.
    """

    def __init__(self, window: int):
        self.window = window
        self.usual_spare = max(window // 4, 8)
        self.spare = self.usual_spare
        self.buffer: Tensor | None = None
        self.buffer_positions: Tensor | None = None
        self.count = 0
        self.forgot = False

    @property
    def queries(self) -> Float[Tensor, "batch query_heads held head_dim"]:
        """The queries held, oldest first, after RoPE."""
        assert self.buffer is not None
        return self.buffer[:, :, : self.count]

    @property
    def positions(self) -> Int[Tensor, "batch held"]:
        """Their positions."""
        assert self.buffer_positions is not None
        return self.buffer_positions[:, : self.count]

    def append(
        self, queries: Float[Tensor, "batch query_heads new head_dim"], positions: Int[Tensor, "batch new"]
    ) -> None:
        """Adds queries; the oldest are forgotten if there is no room and they need not be held."""
        excess = max(queries.shape[2] - self.window - self.spare, 0)
        self.forgot |= excess > 0
        queries, positions = queries[:, :, excess:], positions[:, excess:]
        new = queries.shape[2]
        if self.buffer is None or self.count + new > self.buffer.shape[2]:
            self._make_room(queries, positions)
        assert self.buffer is not None and self.buffer_positions is not None
        self.buffer[:, :, self.count : self.count + new] = queries.detach()
        self.buffer_positions[:, self.count : self.count + new] = positions
        self.count += new

    def _make_room(self, queries: Tensor, positions: Tensor) -> None:
        """Moves what must be held to the front of a new buffer that also has room for the new queries."""
        new = queries.shape[2]
        stay = min(self.count, self.window + self.spare - new)
        self.forgot |= stay < self.count
        size = max(self.window + 2 * self.usual_spare, stay + new + self.usual_spare)
        with torch.inference_mode(False):  # else the buffer could not be written outside of the mode
            shape = (*queries.shape[:2], size, queries.shape[3])
            buffer = torch.empty(shape, dtype=queries.dtype, device=queries.device)
            buffer_positions = torch.empty(len(positions), size, dtype=positions.dtype, device=positions.device)
        if stay:
            buffer[:, :, :stay] = self.queries[:, :, self.count - stay :]
            buffer_positions[:, :stay] = self.positions[:, self.count - stay :]
        self.buffer, self.buffer_positions, self.count = buffer, buffer_positions, stay

    def trim(self, least: int = 0) -> None:
        """Back to the usual size, but not below the `least` newest queries."""
        if self.buffer is not None and self.buffer.shape[2] > least + self.window + 2 * self.usual_spare:
            stay = min(self.count, max(self.window + self.usual_spare, least))
            self.forgot |= stay < self.count
            queries, positions = self.queries[:, :, self.count - stay :], self.positions[:, self.count - stay :]
            self.buffer, self.buffer_positions, self.count = None, None, 0
            self.append(queries, positions)

    def can_drop(self, tokens: int) -> bool:
        """Whether the window is still whole without the newest `tokens` queries."""
        return not self.forgot or self.count - tokens >= self.window

    def drop(self, tokens: int) -> None:
        """Forgets the newest `tokens` queries."""
        self.count = max(self.count - tokens, 0)

    def map(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replaces every tensor by `change` of it; the batch is the first axis."""
        if self.buffer is not None and self.buffer_positions is not None:
            self.buffer, self.buffer_positions = change(self.buffer), change(self.buffer_positions)
