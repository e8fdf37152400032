"""Encoders that need no hub: tokenizers and a text encoder that are packaged or fitted, and 240 captioned drawings.

They are plug-ins like any other (`entry_points.txt`); the demo, `--minutes` and the tests are prepared with them.
"""
