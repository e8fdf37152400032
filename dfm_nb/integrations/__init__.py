"""Networks and formats from elsewhere, a folder each, and loggers: nothing imports them, and each can be removed.

`entry_points.txt` of a folder names what it adds (`base.installed`), and `recipes/` holds its recipes.
`git grep -l` of its name, and of those that it adds, finds what to remove with it.
"""
