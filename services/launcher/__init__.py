"""Runs a whole mesh on this machine: its plan, its servers, its processes, and who commands them."""
