"""Settings: the schema, its checks, the three layers (recipe < file < command line) and the table of model sizes."""

from dfm_nb.config.resolve import *  # noqa: F403
