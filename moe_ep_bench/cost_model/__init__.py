"""Model what is not here: links between ranks, devices, and their timeline side by side."""
