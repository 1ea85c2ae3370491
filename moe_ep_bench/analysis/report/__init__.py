"""``show --format html``: a results directory as one HTML file that can be sent to somebody and needs no network.

``said`` decides what is said of a run, ``routing`` of a route directory, ``models`` of whole models: plain data
(``parts``), which tests read and ``page`` sets with a template. Of these ``answer`` words the two sentences that come
first, ``captions`` what is to be seen in a figure, ``tables`` the numbers, ``provenance`` where they come from and how
to get them again.
"""
