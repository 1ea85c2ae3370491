"""How time is taken and what may be concluded from it."""
