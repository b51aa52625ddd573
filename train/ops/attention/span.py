"""Which keys a query of the unroll sees.

B rows, A anchors, Q queries of an anchor, I own keys of an anchor.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Span(NamedTuple):
    """Step-0 slots start..stop-1 of each anchor, int64 [B, A], and own keys, bool [B or 1, A or 1, Q, I].

    Without `own` an anchor has one query, which sees all its own keys.
    """

    start: Tensor
    stop: Tensor
    own: Tensor | None = None
