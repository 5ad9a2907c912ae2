"""Doors: everything that can be run. The only floor that looks into several rooms."""
