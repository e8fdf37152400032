"""JSONL to Megatron `.bin/.idx` corpora and blends."""
