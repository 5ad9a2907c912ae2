"""Meshes compared live: the same requests at the same times through each, in turn (``lamella compare``)."""
