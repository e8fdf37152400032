"""Plugins of kind `text_encoders`: one file each, see `dfm_nb.base.plugins`."""
