"""Prompts to clips: requests, the guided denoiser, the pipeline, clip files."""
