"""What measures samples: the attribute judge, feature networks, Frechet and kernel distances."""
