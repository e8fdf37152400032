"""Plugins of kind `sources`: one file each, see `dfm_nb.base.plugins`."""
