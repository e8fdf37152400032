"""JSONL to Megatron `.bin/.idx` corpora and blends."""

VERBS = {"text": ("dfm_nb.text.commands", "JSONL -> Megatron .bin/.idx: preprocess, inspect, verify, merge")}
