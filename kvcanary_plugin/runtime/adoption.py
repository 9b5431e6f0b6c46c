"""Records for rows that storage filled: of the tokens of the request for which they come, and of what storage knows."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..kernels import record as r
from ..tiers.page_records import Ids, Rows
from .truth import Request, tokens_between, true_chains


def make_records(request: Request, anchor: int, positions: Ids, rows: Rows | None) -> npt.NDArray[np.int64]:
    """Records, int64 (n, RECORD_WORDS), of the tokens of ``request`` at ``positions``, int64 (n,), rising.

    Args:
        request: for which they come.
        anchor: of its chain.
        positions: of the tokens.
        rows: (n, ROW_WORDS), what the device that stored them first made of each; None if that is not known. Then
            the digests are left at 0, to be made of the bytes as they come.

    The chain is always that of the request. With ``rows``, token and position are those that were stored: should they
    be others than the request's, the forward that reads them finds that.
    """
    start, stop = int(positions[0]), int(positions[-1]) + 1
    made = np.zeros((len(positions), r.RECORD_WORDS), dtype=np.int64)
    made[:, r.CHAIN] = true_chains(request, anchor, stop)[positions].view(np.int64)
    if rows is None:
        tokens = np.asarray(tokens_between(request, start, stop), dtype=np.int64)[positions - start] & r.TOKEN_MASK
        made[:, r.IDENTITY] = tokens | positions << 32 | r.LIVE_BIT
    else:
        made[:, r.DIGEST], made[:, r.LOCATOR] = rows[:, 0], rows[:, 1]
        made[:, r.IDENTITY] = (rows[:, 2] & r.MIX_INPUT_MASK) | r.LIVE_BIT
    return made
