"""What ``route`` wrote: frames (``load``), their tables, and the figures that are drawn from them."""
