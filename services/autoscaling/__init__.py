"""Follows the schedulers' plans, and operators' wishes, wherever a mesh runs: `lamella autoscale`."""
