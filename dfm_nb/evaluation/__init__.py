"""What measures samples: the attribute judge, features, kernel distance, recall and copies."""
