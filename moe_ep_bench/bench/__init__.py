"""Plan what is measured, measure it on one of four backends, and write the rows."""
