"""``doctor``: what this machine can do, and what each part that it lacks costs."""
