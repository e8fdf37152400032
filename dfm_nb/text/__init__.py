"""JSONL to Megatron `.bin/.idx` corpora and blends, and a small GPT."""
