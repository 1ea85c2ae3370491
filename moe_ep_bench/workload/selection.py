"""The model's own top-k, as workloads need it: which experts a token would go to if no policy interfered.

Shapes: T = tokens, E = experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class TopK:
    """Top-k over all experts, or over those of the best groups (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).

    Attributes:
        top_k: experts per token.
        num_groups, top_groups: the top-k looks only into the ``top_groups`` best of ``num_groups`` equal groups
            of experts; a group's value is the sum of its best ``top_k // top_groups`` scores. None = no groups.
    """

    top_k: int
    num_groups: int | None = None
    top_groups: int | None = None

    def chosen(self, logits_TE: NDArray[np.floating], factor: float = 1.0) -> NDArray[np.bool_]:
        """Which experts each token goes to, bool [T, E], where its scores are the softmax of ``factor * logits_TE``.

        Rows without ties are assumed.
        """
        if self.num_groups is not None and self.top_groups is not None:
            logits_TE = np.where(self._in_best_groups(logits_TE, factor), logits_TE, -np.inf)
        kth = logits_TE.shape[1] - self.top_k
        return logits_TE >= np.partition(logits_TE, kth, axis=1)[:, kth, None]

    def _in_best_groups(self, logits_TE: NDArray[np.floating], factor: float) -> NDArray[np.bool_]:
        assert self.num_groups is not None
        assert self.top_groups is not None
        num_tokens, num_experts = logits_TE.shape
        odds_TE = np.exp(factor * (logits_TE - logits_TE.max(axis=1, keepdims=True)))
        size, counted = num_experts // self.num_groups, self.top_k // self.top_groups
        odds_TGE = odds_TE.reshape(num_tokens, self.num_groups, size)
        value_TG = np.partition(odds_TGE, size - counted, axis=2)[:, :, size - counted :].sum(axis=2)
        # Groups may tie, at zero say: the order of a stable sort decides, and exactly top_groups are taken.
        best_TG = np.argsort(-value_TG, axis=1, kind="stable")[:, : self.top_groups]
        in_best_TG = np.zeros(value_TG.shape, dtype=bool)
        np.put_along_axis(in_best_TG, best_TG, True, axis=1)
        return in_best_TG.repeat(size, axis=1)
