"""Where the live pages of the extension slab go before it is freed. Host side; the pool plans, the device copies."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Migration:
    """from_pages, to_pages: i32[N], distinct; from_pages in the extension slab, to_pages in the base pool, where they
    are reserved until the pool publishes or abandons the migration."""

    from_pages: np.ndarray
    to_pages: np.ndarray

    def remap(self, num_pages: int) -> np.ndarray:
        """i32[num_pages]: the id that each page has afterwards; pages that do not move keep theirs."""
        remap = np.arange(num_pages, dtype=np.int32)
        remap[self.from_pages] = self.to_pages
        return remap

    def only(self, mask: np.ndarray) -> Migration:
        """The moves that `mask` (bool[N]) names."""
        return Migration(self.from_pages[mask], self.to_pages[mask])
