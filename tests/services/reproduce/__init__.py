"""``lamella reproduce``: the papers' comparisons, made again."""
