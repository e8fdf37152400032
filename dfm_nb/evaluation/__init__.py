"""What measures samples of any data: features, kernel distance, recall, copies, and the table of what was found."""
