"""Labels of cases with shorter names of fields, for tables that have to fit."""

from __future__ import annotations

import re

_SHORTER = {
    r"capacity_factor=": "",
    r"(granularity|scope)=": "per ",
    r"(metric|modality)=": "",
    r"(request|rank)_budget": "budget",
    r" \(\d+ us to solve\)": "",
}


def short_label(label: str) -> str:
    """``token_drop 1.0 per device`` of ``token_drop capacity_factor=1.0 granularity=device``."""
    for key, shorter in _SHORTER.items():
        label = re.sub(key, shorter, label)
    return label
