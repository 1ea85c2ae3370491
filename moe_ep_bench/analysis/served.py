"""What servers took for requests, and how far their answers agree (``serve``); by case.

A sample is one request: its time from sending to the last token, to the first one (TTFT), and of each further token
(TPOT). Of a round there is one sample of the time per token that all its requests together had, whose inverse is the
throughput. Pairs are the same request of the same round and start, native's over the case's. Rounds are what is
resampled: requests of one round shared the server's steps.

Answers are compared with native's to the same prompt in the same place. Where servers say tokens these are compared,
else characters. Native again says how many answers differ by themselves: a busy server rounds by what shares a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from moe_ep_bench.analysis.store import ITERATION
from moe_ep_bench.schema import ALONE, LOAD

# Quantities beside a request's whole time, by the prefix of their columns.
QUANTITIES = {"ttft": "first_us", "tpot": "token_us", "throughput": "round_us"}
_KEY = ["case", *ITERATION]


def request_times(requests: pd.DataFrame) -> pd.DataFrame:
    """Times of requests that were sent in rounds, by case, launch, batch and iteration, us.

    Columns: ``time_us``, ``first_us``; ``token_us``, null of answers of one token; ``round_us``, per token of all
    answers of a round, in its first request alone; ``bunch``, tokens that came at once, mean over an answer.
    """
    rows = requests[requests["kind"] == LOAD].astype({"batch": int, "iteration": int}).set_index(_KEY).sort_index()
    after_first = rows["num_tokens"].astype(float) - 1
    rounds = rows.groupby(level=_KEY[:-1])
    end_us = (rows["sent_us"] + rows["time_us"]).groupby(level=_KEY[:-1]).max() - rounds["sent_us"].min()
    round_us = (end_us / rounds["num_tokens"].sum()).reindex(rows.droplevel("iteration").index)
    is_first = rows.index.get_level_values("iteration") == 0
    return pd.DataFrame(
        {
            "time_us": rows["time_us"],
            "first_us": rows["first_us"],
            "token_us": ((rows["time_us"] - rows["first_us"]) / after_first).where(after_first > 0),
            "round_us": np.where(is_first, round_us, np.nan),
            "bunch": rows["num_tokens"] / rows["num_arrivals"].astype(float),
        },
        rows.index,
    ).astype(float)


def quantiles(times_us: pd.DataFrame) -> pd.DataFrame:
    """``ttft_ms``, ``tpot_ms`` and their ``p99``; medians ``tokens_per_s`` over rounds and ``bunch``; by case."""
    by_case = times_us.groupby(level="case")
    of_each = {
        f"{name}_{end}ms": by_case[QUANTITIES[name]].quantile(share) / 1e3
        for name in ("ttft", "tpot")
        for end, share in (("", 0.5), ("p99_", 0.99))
    }
    medians = {"tokens_per_s": 1e6 / by_case["round_us"].median(), "bunch": by_case["bunch"].median()}
    return pd.DataFrame({**of_each, **medians})


def agreement(requests: pd.DataFrame, native: pd.Series) -> pd.DataFrame:
    """How far answers are native's; by case, of native itself nothing.

    Args:
        native: by case, the one that it is compared with.

    Returns:
        ``equal_share`` of answers; ``first_difference``, the median token (or character) at which others differ first;
        ``logprob_difference``, mean distance of log-probabilities of the tokens before that, nats; the same of requests
        that were sent alone, with ``alone_`` before.
    """
    place = ["kind", "launch", "batch", "iteration", "prompt"]
    rows = requests.assign(native=requests["case"].map(native), batch=requests["batch"].fillna(-1))
    answers = ["text", "tokens", "logprobs"]
    others = rows[["case", *place, *answers]].rename(columns={"case": "native"})
    pairs = rows[rows["case"] != rows["native"]].merge(others, on=["native", *place], suffixes=("", "_native"))
    if pairs.empty:
        return pd.DataFrame()
    found = pd.DataFrame(
        [
            _compared(*row)
            for row in zip(*(pairs[f"{name}{end}"] for end in ("", "_native") for name in answers), strict=True)
        ],
        pairs.index,
        columns=["first_difference", "logprob_difference"],
    ).astype(float)
    found["equal_share"] = found["first_difference"].isna().astype(float)
    parts = []
    for kind, prefix in ((LOAD, ""), (ALONE, "alone_")):
        of_kind = pairs["kind"] == kind
        by_case = found[of_kind].groupby(pairs["case"][of_kind])
        shares = by_case[["equal_share", "logprob_difference"]].mean()
        parts.append(shares.join(by_case["first_difference"].median()).add_prefix(prefix))
    return pd.concat(parts, axis=1)


def lengths(requests: pd.DataFrame, native: pd.Series) -> pd.DataFrame:
    """Lengths of answers in rounds, by case: ``other_length_share``, those that have not native's; ``shortest``."""
    rows = requests.loc[requests["kind"] == LOAD, [*_KEY, "num_tokens"]].astype({"num_tokens": float})
    others = rows.rename(columns={"case": "native", "num_tokens": "num_native"})
    pairs = rows.assign(native=rows["case"].map(native)).merge(others, on=["native", *ITERATION])
    is_other = pairs["num_tokens"] != pairs["num_native"]
    shortest = rows.groupby("case")["num_tokens"].min()
    return pd.DataFrame({"other_length_share": is_other.groupby(pairs["case"]).mean(), "shortest": shortest})


def _compared(
    text: str,
    tokens: Sequence[str],
    logprobs: Sequence[float],
    text_native: str,
    tokens_native: Sequence[str],
    logprobs_native: Sequence[float],
) -> tuple[float, float]:
    """Where an answer first differs from native's, NaN if nowhere; mean distance of log-probabilities before that."""
    by_token = len(tokens) > 0 and len(tokens_native) > 0
    ours, theirs = (tokens, tokens_native) if by_token else (text, text_native)
    first = first_difference(ours, theirs)
    same = first if first is not None else len(ours)
    known = [
        abs(ours - theirs)
        for ours, theirs in zip(logprobs[:same], logprobs_native[:same], strict=False)
        if by_token and ours is not None and theirs is not None
    ]
    return np.nan if first is None else float(first), float(np.mean(known)) if known else np.nan


def first_difference(ours: Sequence[str], theirs: Sequence[str]) -> int | None:
    """The first place at which two answers differ; None where they are equal."""
    for place, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other:
            return place
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))
