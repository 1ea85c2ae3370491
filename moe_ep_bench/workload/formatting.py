"""Numbers of things in titles: one is no plural."""


def tokens_words(num_tokens: int) -> str:
    """``1 token``, ``4,096 tokens``."""
    return f"{num_tokens:,} token{'' if num_tokens == 1 else 's'}"
