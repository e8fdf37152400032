"""Measures of samples of any data: features, kernel distance, recall, copies, the table of results and the verdict."""

VERBS = {"evaluate": ("dfm_nb.measure.evaluate", "measure a checkpoint against its captions")}
