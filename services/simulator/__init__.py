"""A cluster in virtual time: the decisions that run live, driven by performance models."""
