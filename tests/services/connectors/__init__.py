"""Connectors, with programs that stand for what runs where a mesh does."""
