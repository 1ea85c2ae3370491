"""Take times, and say what may be concluded from them."""
