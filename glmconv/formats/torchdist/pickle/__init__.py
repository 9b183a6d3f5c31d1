"""The restricted reader and the writer of pickles: no foreign class is ever called."""
