"""Whole meshes: real processes, real servers, the official client."""
