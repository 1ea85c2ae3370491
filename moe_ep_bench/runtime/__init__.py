"""Start processes, let ranks find each other, and end every hang with a reason."""
