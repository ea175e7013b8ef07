"""Parts of `readme.py`: points, published figures, plots."""
