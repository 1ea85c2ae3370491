"""Numbers that papers publish, and ours beside them."""
