"""Networks and formats that come from elsewhere, a folder each: nothing imports them, and each can be removed.

`entry_points.txt` of a folder names what it adds (`base.installed`), and `recipes/` holds its recipes.
`scripts/house_figures.py --without NAME` lists what to remove with it.
"""
