"""Wan 2.1 (arXiv 2503.20314), text to video: its network, weights, video autoencoder and text encoder."""
