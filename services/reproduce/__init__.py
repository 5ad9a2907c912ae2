"""Headline comparisons of the papers, each made again with one command."""
