"""Plugins of kind `tokenizers`: one file each, see `dfm_nb.base.plugins`."""
