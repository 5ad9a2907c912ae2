"""The rooms' states as one mesh in virtual time: what it does follows from a seed alone."""
