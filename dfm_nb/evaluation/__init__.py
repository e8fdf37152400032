"""Measures of samples of any data: features, kernel distance, recall, copies, and the table of results."""
