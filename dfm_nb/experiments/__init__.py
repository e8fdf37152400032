"""Several runs at once: `dfm sweep`, and the table that compares them."""

VERBS = {"sweep": ("dfm_nb.experiments.sweep", "train every combination of settings, and compare them")}
