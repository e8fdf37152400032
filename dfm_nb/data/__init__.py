"""From sources to shards, and from shards to packs."""
