"""``show --format html``: a results directory as one HTML file that can be sent to somebody and needs no network."""
