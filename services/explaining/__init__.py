"""``lamella explain``: why a request went where it went, and what else could have been done."""
